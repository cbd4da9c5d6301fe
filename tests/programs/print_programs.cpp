// Writes the test programs as text that printed_test.cpp includes, or with two arguments the library's words for their
// golden files:
//   print_programs FILE | print_programs golden FOLDER
#include <fmt/format.h>

#include <fstream>
#include <iostream>
#include <string>

#include "expr/print_cuda.hpp"
#include "programs/library_words.hpp"
#include "programs/test_programs.hpp"

namespace fovea::testing {
namespace {

std::string test_programs_text() {
  const ProgramData data;
  const Captures captures = data.captures();
  std::string text = "// Printed by tests/programs/print_programs.cpp.\n";
  std::string table;
  int i = 0;
  for (const TestProgram& program : test_programs(captures)) {
    const expr::CudaProgram printed = expr::print_cuda(program.score, program.mask);
    // Each in a namespace of its own, where the words of `program` are known as they are in a kernel's unit.
    text += fmt::format(
        "namespace fovea::cuda::case_{0} {{\nnamespace program {{\nusing namespace "
        "::fovea::cuda::program;\n}}\n{1}}}\n\n",
        i, printed.mods);
    table += fmt::format("    printed_program<case_{}::Mods>(),\n", i);
    ++i;
  }
  return text +
         "namespace fovea::cuda {\ninline constexpr PrintedProgram kPrintedPrograms[] = {\n" +
         table + "};\n}\n";
}

bool write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  return file.good();
}

bool write_golden(const std::string& folder) {
  bool is_written = true;
  for (const LibraryWord& word : library_words()) {
    is_written = write(folder + "/" + word.name + ".txt", golden_text(word)) && is_written;
  }
  return is_written;
}

}  // namespace
}  // namespace fovea::testing

int main(int argc, char** argv) {
  const bool is_golden = argc == 3 && std::string(argv[1]) == "golden";
  if (!is_golden && argc != 2) {
    std::cerr << "print_programs FILE | print_programs golden FOLDER\n";
    return 2;
  }
  using namespace fovea::testing;
  return (is_golden ? write_golden(argv[2]) : write(argv[1], test_programs_text())) ? 0 : 1;
}
