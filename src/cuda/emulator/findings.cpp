#include <fmt/format.h>

#include <algorithm>

#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {
namespace {

std::string_view verb(AccessKind kind) {
  switch (kind) {
    case AccessKind::read:
      return "reads";
    case AccessKind::write:
      return "writes";
    case AccessKind::atomic:
      return "changes atomically";
  }
  return "";
}

std::string describe_site(Site site) {
  const std::string_view path = site.file;
  const std::size_t slash = path.rfind('/');
  const std::string_view file = slash == std::string_view::npos ? path : path.substr(slash + 1);
  return fmt::format("[{}:{}]", file, site.line);
}

std::string describe_lanes(LaneMask lanes) {
  std::string text;
  for (std::uint32_t lane = 0; lane < kMostLanes; ++lane) {
    if ((lanes >> lane & 1U) == 0) continue;
    std::uint32_t last = lane;
    while (last + 1 < kMostLanes && (lanes >> (last + 1) & 1U) != 0) ++last;
    if (!text.empty()) text += ',';
    text += last == lane ? fmt::format("{}", lane) : fmt::format("{}-{}", lane, last);
    lane = last;
  }
  return text;
}

}  // namespace

SiteId Machine::intern(Site site) {
  const auto key = reinterpret_cast<std::uintptr_t>(site.file) * 0x9e3779b97f4a7c15U +
                   static_cast<std::uint64_t>(site.line);
  SiteCacheEntry& cached = site_cache_[key >> 32 & (site_cache_.size() - 1)];
  if (cached.key == key && cached.id != 0) return cached.id;
  const auto [entry, is_new] = site_ids_.try_emplace(key, static_cast<SiteId>(sites_.size()));
  if (is_new) sites_.push_back(site);
  cached = {key, entry->second};
  return entry->second;
}

std::string Machine::describe(const Thread& thread) const {
  const Dim3 cta = thread.cta->idx;
  std::string text = fmt::format("cta ({},{},{}) thread {} (warp {} lane {}", cta.x, cta.y, cta.z,
                                 thread.linear, thread.warp->idx, thread.lane);
  if (*thread.role != 0) text += fmt::format(", {}", thread.role);
  return text + ")";
}

std::string Machine::describe(const Block& block, ByteRange range) const {
  if (block.is_tensor()) {
    const std::uint64_t cell = range.begin / 4, first = cell % kTensorColumns;
    return fmt::format("lane {}, columns {}-{} of tensor memory", cell / kTensorColumns, first,
                       first + range.bytes / 4 - 1);
  }
  return fmt::format("{} bytes at {}+{:#x}", range.bytes, block.name(), range.begin);
}

std::string Machine::describe_agent(const Stamp& stamp) const {
  if (is_of_grid_before(stamp.wave)) return "the grid before";
  if (stamp.wave != wave_) return "another CTA";
  const Agent& agent = agents_[stamp.agent];
  const std::string who = agent.thread == nullptr ? "" : " of " + describe(*agent.thread);
  if (*agent.what == 0) return who.substr(std::min<std::size_t>(4, who.size()));
  return agent.what + who;
}

void Machine::report(Fault fault, const Thread* who, const std::string& text, Site site,
                     Site other) {
  const auto known =
      std::find_if(report_.findings.begin(), report_.findings.end(), [&](const Finding& finding) {
        return finding.fault == fault && finding.site == site && finding.other == other;
      });
  if (known != report_.findings.end()) {
    ++known->count;
    return;
  }
  std::string line = fmt::format("{}: ", name(fault));
  if (who != nullptr) line += describe(*who) + " ";
  line += text;
  if (site.line != 0) line += " " + describe_site(site);
  if (other.line != 0) line += "; the other stands at " + describe_site(other);
  report_.findings.push_back(
      {.fault = fault, .text = std::move(line), .site = site, .other = other, .count = 1});
  if (static_cast<int>(report_.findings.size()) >= options_.max_findings) is_ending_ = true;
}

bool Machine::is_tensor_fence_missing(const Actor& actor, const Stamp& other) const {
  if (actor.known == nullptr || other.wave != actor.wave) return false;
  if (actor.known->of(other.agent) >= other.time) return true;  // released, not taken over
  const Thread* owner = thread_of(other.agent);
  return owner != nullptr && owner->tensor.done.of(other.agent) >= other.time &&
         actor.known->of(owner->agent) > owner->tensor.done_at;
}

void Machine::report_race(const Actor& actor, AccessKind kind, const Block& block, ByteRange range,
                          const Stamp& other, AccessKind other_kind) {
  if (block.is_tensor() && is_tensor_fence_missing(actor, other)) {
    report(
        Fault::tensor_fence_missing, actor.thread,
        fmt::format("{} {} by {}; between what {} {} and here are a barrier and its wait, but no "
                    "fence::before_thread_sync before the one or no fence::after_thread_sync "
                    "behind the other",
                    verb(kind), describe(block, range), actor.what, describe_agent(other),
                    other_kind == AccessKind::read ? "read" : "wrote"),
        site(actor.site), site(other.site));
    return;
  }
  report(Fault::race, actor.thread,
         fmt::format("{} {} by {}, in no order with what {} {}", verb(kind), describe(block, range),
                     actor.what, describe_agent(other),
                     other_kind == AccessKind::read ? "read" : "wrote"),
         site(actor.site), site(other.site));
}

void Machine::report_race_between_ctas(const Actor& actor, AccessKind kind, const Block& block,
                                       ByteRange range) {
  report(Fault::race, actor.thread,
         fmt::format("{} {} by {}, in no order with a read by another CTA", verb(kind),
                     describe(block, range), actor.what),
         site(actor.site));
}

void Machine::report_uninitialised(const Actor& actor, const Block& block, ByteRange range) {
  report(
      Fault::uninitialised, actor.thread,
      fmt::format("reads {} by {}, where nothing was written", describe(block, range), actor.what),
      site(actor.site));
}

void Machine::report_non_coherent(const Actor& actor, const Block& block, ByteRange range,
                                  const Stamp& written) {
  report(
      Fault::non_coherent_read, actor.thread,
      fmt::format("reads {} by {}, the path for what no thread of the grid writes; written by {}",
                  describe(block, range), actor.what, describe_agent(written)),
      site(actor.site), site(written.site));
}

void Machine::report_unfenced(const Actor& actor, const Block& block, ByteRange range,
                              const Stamp& written) {
  report(Fault::proxy_fence_missing, actor.thread,
         fmt::format("touches {} by {}; between the writer's fence.proxy.async and here is no "
                     "barrier, or there was no fence; written by {}",
                     describe(block, range), actor.what, describe_agent(written)),
         site(actor.site), site(written.site));
}

// One row for the lanes of a warp that wait at one line.
void Machine::report_deadlock() {
  std::string table = "nothing can run, and nothing in flight is left to land";
  for (const Warp* warp : warps_) {
    LaneMask reported = 0;
    for (const Thread* first : warp->lanes) {
      if (first == nullptr || first->wait == nullptr || (reported >> first->lane & 1U) != 0)
        continue;
      LaneMask lanes = 0;
      for (const Thread* lane : warp->lanes) {
        if (lane == nullptr || lane->wait == nullptr) continue;
        const bool is_alike =
            lane->wait->site == first->wait->site && lane->wait->object == first->wait->object;
        if (is_alike) lanes |= LaneMask{1} << lane->lane;
      }
      reported |= lanes;
      const Dim3 cta = warp->cta->idx;
      table +=
          fmt::format("\n  cta ({},{},{}) warp {} lanes {}{}{}: {} {}; {}", cta.x, cta.y, cta.z,
                      warp->idx, describe_lanes(lanes), *first->role != 0 ? ", " : "", first->role,
                      first->wait->what, describe_site(first->wait->site), first->wait->details());
    }
    if (warp->alive == 0) continue;
    const LaneMask ended = warp->existing & ~warp->alive;
    if (ended != 0) {
      table += fmt::format("\n  of that warp lanes {} have ended", describe_lanes(ended));
    }
  }
  report(Fault::deadlock, nullptr, table, {});
  for (const std::unique_ptr<Cta>& cta : ctas_) check_mbarriers(*this, *cta);
}

}  // namespace fovea::cuda::emulator
