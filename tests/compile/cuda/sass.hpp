// What the machine code of a cubin says, by nvdisasm (PyPI nvidia-cuda-nvdisasm, or a toolkit's). Without it, tests
// that look at machine code are skipped by name.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/jit/cubin.hpp"
#include "cuda/jit/places.hpp"

namespace fovea::cuda {

/// FOVEA_NVDISASM, a wheel in the environment of scripts/dev setup, a toolkit, or what the shell knows.
inline std::optional<std::string> find_nvdisasm() {
  namespace fs = std::filesystem;
  if (const char* named = std::getenv("FOVEA_NVDISASM")) return named;
  std::vector<fs::path> candidates;
  const auto add_environment = [&](const fs::path& root) {
    std::error_code ignored;
    for (const auto& python : fs::directory_iterator(root / "lib", ignored)) {
      for (const char* wheel : {"cu13", "cu12", "cuda_nvdisasm"}) {
        candidates.push_back(python.path() / "site-packages/nvidia" / wheel / "bin/nvdisasm");
      }
    }
  };
  if (const char* environment = std::getenv("VIRTUAL_ENV")) add_environment(environment);
  if (const auto toolchain = jit::toolchain_folder()) add_environment(*toolchain);
  std::string path = std::getenv("PATH") != nullptr ? std::getenv("PATH") : "";
  for (std::size_t begin = 0; begin < path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    candidates.push_back(fs::path(path.substr(begin, end - begin)) / "nvdisasm");
    begin = end + 1;
  }
  for (const fs::path& candidate : candidates) {
    std::error_code ignored;
    if (fs::is_regular_file(candidate, ignored)) return candidate.string();
  }
  return std::nullopt;
}

/// The text of each function of a cubin. Empty where nvdisasm fails.
inline std::map<std::string, std::string> disassemble(const std::string& nvdisasm,
                                                      std::span<const std::byte> cubin) {
  const std::filesystem::path file = std::filesystem::temp_directory_path() /
                                     ("fovea_sass_" + std::to_string(::getpid()) + ".cubin");
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(cubin.data()),
             static_cast<std::streamsize>(cubin.size()));
  std::map<std::string, std::string> functions;
  if (FILE* pipe = ::popen((nvdisasm + " -c " + file.string()).c_str(), "r")) {
    std::string* current = nullptr;
    char line[4096];
    while (std::fgets(line, sizeof line, pipe) != nullptr) {
      const std::string text(line);
      if (text.rfind(".text.", 0) == 0) current = &functions[text.substr(6, text.find(':') - 6)];
      if (current != nullptr) *current += text;
    }
    ::pclose(pipe);
  }
  std::filesystem::remove(file);
  return functions;
}

/// The machine code of a kernel that the library compiles; none without nvdisasm.
inline std::optional<std::string> machine_code(const jit::Cubin& cubin) {
  const auto nvdisasm = find_nvdisasm();
  if (!nvdisasm) return std::nullopt;
  return disassemble(*nvdisasm, cubin.image).at(std::string(jit::kEntryName));
}

inline int count(std::string_view text, std::string_view word) {
  int times = 0;
  for (std::size_t at = 0; (at = text.find(word, at)) != std::string_view::npos; ++at) ++times;
  return times;
}

/// From a label to a branch back to it, where the word stands so many times between them; the shortest first. (Waits
/// that ptxas puts behind everything branch back too, over much else.)
inline std::vector<std::string> loops_with(const std::string& function, std::string_view word,
                                           int times) {
  std::map<std::string, std::size_t> labels;
  std::vector<std::string> loops;
  std::istringstream lines(function);
  std::size_t at = 0;
  for (std::string line; std::getline(lines, line); at += line.size() + 1) {
    if (line.starts_with(".L_")) labels[line.substr(0, line.find(':'))] = at;
    const std::size_t target = line.find("BRA `(");
    if (target == std::string::npos) continue;
    const std::size_t name = target + 6;
    const auto label = labels.find(line.substr(name, line.find(')', name) - name));
    if (label == labels.end()) continue;
    std::string loop = function.substr(label->second, at - label->second);
    if (count(loop, word) == times) loops.push_back(std::move(loop));
  }
  std::ranges::sort(loops, {}, &std::string::size);
  return loops;
}

}  // namespace fovea::cuda
