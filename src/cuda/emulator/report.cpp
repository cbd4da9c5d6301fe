#include "cuda/emulator/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace fovea::cuda::emulator {

std::string_view name(Fault fault) {
  static constexpr std::array<std::string_view, 33> kNames = {
      "out of bounds",
      "misaligned address",
      "uninitialised read",
      "race",
      "non-coherent read",
      "divergence",
      "barrier count",
      "deadlock",
      "copy not waited for",
      "mbarrier misuse",
      "transaction bytes",
      "parity aliasing",
      "missing fence.proxy.async",
      "accumulator in flight",
      "operand of wgmma in flight overwritten",
      "missing wgmma.fence",
      "missing wgmma.commit_group",
      "missing wgmma.wait_group",
      "matrix descriptor",
      "tensor map",
      "register budget",
      "cluster lifetime",
      "allocation of tensor memory",
      "address in tensor memory",
      "issue of tcgen05",
      "missing tcgen05.fence",
      "tcgen05.ld in flight",
      "tcgen05 not waited for",
      "instruction descriptor",
      "scale factors",
      "instruction of later GPUs",
      "trap",
      "livelock",
  };
  return kNames.at(static_cast<std::size_t>(fault));
}

std::string_view name(Landing landing) {
  switch (landing) {
    case Landing::seeded:
      return "seeded";
    case Landing::earliest:
      return "earliest";
    case Landing::latest:
      return "latest";
  }
  return "";
}

bool Report::has(Fault fault) const {
  return std::any_of(findings.begin(), findings.end(),
                     [&](const Finding& finding) { return finding.fault == fault; });
}

std::string Report::text() const {
  if (is_clean()) return {};
  std::string text;
  for (const Finding& finding : findings) {
    text += finding.text;
    if (finding.count > 1) text += fmt::format(" ({} times)", finding.count);
    text += '\n';
  }
  return text + fmt::format("replay with Options{{.seed = {}, .landing = Landing::{}}}\n", seed,
                            name(landing));
}

}  // namespace fovea::cuda::emulator
