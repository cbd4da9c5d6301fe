// fovea draw-mask: which tiles of a mask are empty, partial or full, as a picture and as numbers.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "fovea/block_map.hpp"

#include "attention_options.hpp"
#include "command.hpp"
#include "command_line.hpp"
#include "failure.hpp"
#include "files.hpp"
#include "png.hpp"
#include "shard_options.hpp"

namespace fovea::tools {
namespace {

constexpr const char* kAbout =
    "Draws a mask in tiles: queries go down, keys go right. Empty tiles are skipped, full ones run "
    "without mask cost.";

constexpr const char* kExamples =
    R"(Examples
  A sliding window under a causal mask:
    fovea draw-mask --seqlen-q 1024 --causal --window 256,0
  A formula, as it stands in --mask-mod of attend:
    fovea draw-mask --seqlen-q 512 --mask-mod 'q_idx // 64 == kv_idx // 64 || kv_idx < 16' --tile-q 16 --tile-kv 16
  Documents of a batch, into a picture:
    fovea draw-mask --batch 2 --seqlen-q 4096 --segments-q ids.npy --sequence 1 --png mask.png
  Who computes what over 8 ranks:
    fovea draw-mask --seqlen-q 8192 --causal --ranks 8
)";

constexpr double kMaxTiles = 1 << 26;  // seconds to minutes; at 64 x 64 half a million tokens

struct DrawMaskOptions {
  AttentionOptions attention;
  ShardingOptions sharding;
  std::int64_t tile_q = 64, tile_kv = 64, sequence = 0, q_head = 0;
  std::optional<std::string> png;
  bool wants_json = false;
};

void add_picture_options(CommandLine& line, DrawMaskOptions& options) {
  constexpr const char* kGroup = "Picture";
  const auto add = [&](const std::string& name, const std::string& help, std::int64_t& field,
                       std::int64_t least) {
    line.add({name, "N", kGroup, help},
             [&field, least](const std::string& option, const std::string& text) {
               field = parse_integer(option, text, {.least = least, .most = std::int64_t{1} << 30});
             });
  };
  add("--tile-q", "queries of a tile (default 64)", options.tile_q, 1);
  add("--tile-kv", "keys of a tile (default 64)", options.tile_kv, 1);
  add("--sequence", "which sequence of the batch (default 0)", options.sequence, 0);
  add("--q-head", "which query head (default 0)", options.q_head, 0);
  line.add({"--png", "FILE", kGroup, "write the picture to this file"},
           [&](const std::string&, const std::string& path) { options.png = path; });
  line.add_flag({"--json", "", kGroup, "print one JSON object of counts instead of a picture"},
                options.wants_json);
}

BlockMap build(const DrawMaskOptions& options, const Inputs& inputs, const MaskMod& mask) {
  const AttentionOptions& o = options.attention;
  const std::int64_t batch = o.batch.value_or(1), num_heads_q = o.num_heads_q.value_or(1);
  const std::int64_t num_heads_kv = o.num_heads_kv.value_or(num_heads_q);
  if (options.sequence >= std::max<std::int64_t>(batch, 1)) {
    bad_input(
        fmt::format("--sequence: got {}; expected less than --batch {}", options.sequence, batch));
  }
  if (options.q_head >= num_heads_q) {
    bad_input(fmt::format("--q-head: got {}; expected less than --num-heads-q {}", options.q_head,
                          num_heads_q));
  }
  if (num_heads_q % num_heads_kv != 0) {
    bad_input(fmt::format("--num-heads-kv: {} does not divide --num-heads-q {}", num_heads_kv,
                          num_heads_q));
  }
  const TensorView q = as_bshd(inputs.q.view(), o.layout), k = as_bshd(inputs.k.view(), o.layout);
  const double tiles = static_cast<double>(q.size(1)) / static_cast<double>(options.tile_q) *
                       (static_cast<double>(k.size(1)) / static_cast<double>(options.tile_kv));
  if (tiles > kMaxTiles) {
    bad_input(fmt::format(
        "--tile-q: {} x {} makes {:.0f} tiles; expected at most {:.0f}, take larger ones",
        options.tile_q, options.tile_kv, tiles, kMaxTiles));
  }
  return block_map({.mask = mask,
                    .batch = std::max<std::int64_t>(batch, 1),
                    .num_heads_q = num_heads_q,
                    .num_heads_kv = num_heads_kv,
                    .seqlen_q = q.size(1),
                    .seqlen_kv = k.size(1),
                    .tile_q = options.tile_q,
                    .tile_kv = options.tile_kv,
                    .sequence = options.sequence,
                    .q_head = options.q_head});
}

std::string statistics(const TileCount& count, const DrawMaskOptions& options,
                       const MaskMod& mask) {
  const double total = static_cast<double>(std::max<std::int64_t>(count.total(), 1));
  const auto share = [&](std::int64_t part) { return 100.0 * static_cast<double>(part) / total; };
  return fmt::format(
      "mask   {}\ntiles  {} of {} x {}: {} empty ({:.1f} %), {} partial ({:.1f} %), {} full "
      "({:.1f} %)\n",
      mask.to_string(), count.total(), options.tile_q, options.tile_kv, count.empty,
      share(count.empty), count.partial, share(count.partial), count.full, share(count.full));
}

/// The same problem over ranks: every head and sequence of it, since tokens are dealt by all of them.
std::optional<ShardPlan> build_shards(const DrawMaskOptions& options, const Inputs& inputs,
                                      const MaskMod& mask) {
  if (!options.sharding.num_ranks) return std::nullopt;
  const auto shape = [&](const Array& array) {
    return as_bshd(array.view(), options.attention.layout).spec();
  };
  const Problem problem{
      .q = shape(inputs.q), .k = shape(inputs.k), .v = shape(inputs.v), .mask = mask};
  return context_parallel_plan(problem, *options.sharding.num_ranks, options.sharding.scheme,
                               {.tile_q = options.tile_q, .tile_kv = options.tile_kv});
}

void write_png(const std::string& path, const MaskPicture& image) {
  if (image.width <= 0 || image.height <= 0)
    bad_input("--png: the mask has no elements; expected lengths above 0");
  OutputFiles::write({{path, encode_png(image.width, image.height, image.rgb), {}}});
}

int draw(const DrawMaskOptions& options) {
  OutputFiles files;
  if (options.png) files.add("--png", *options.png);
  const Inputs inputs = inputs_of_shapes(options.attention, files);
  files.refuse_clashes();
  const MaskMod mask = make_mask(options.attention, inputs);
  const BlockMap map = build(options, inputs, mask);
  const auto shards = build_shards(options, inputs, mask);
  const TileCount count = map.count();
  if (options.png) {
    write_png(*options.png,
              shards ? shards->draw_ranks(options.sequence, options.q_head) : map.draw());
  }
  if (options.wants_json) {
    nlohmann::ordered_json json = {
        {"command", "draw-mask"},
        {"mask", mask.to_string()},
        {"seqlen_q", map.seqlen_q()},
        {"seqlen_kv", map.seqlen_kv()},
        {"tile_q", options.tile_q},
        {"tile_kv", options.tile_kv},
        {"tiles", {{"empty", count.empty}, {"partial", count.partial}, {"full", count.full}}}};
    if (shards) json["context_parallel"] = nlohmann::ordered_json::parse(shards->json());
    print_out(json.dump() + "\n");
    return kSuccess;
  }
  std::string text = shards ? shards->print_ranks(options.sequence, options.q_head) : map.print();
  if (!text.ends_with('\n')) text += '\n';
  if (shards) text += shards->print();
  text += statistics(count, options, mask);
  if (options.png) text += fmt::format("wrote  {}\n", *options.png);
  print_out(text);
  return kSuccess;
}

}  // namespace

int run_draw_mask(const std::vector<std::string>& words) {
  DrawMaskOptions options;
  CommandLine line("fovea draw-mask", kAbout, kExamples);
  add_shape_options(line, options.attention);
  add_mask_options(line, options.attention);
  add_picture_options(line, options);
  add_rank_options(line, options.sharding);
  if (line.parse(words) == Parsed::help_was_printed) return kSuccess;
  refuse_without_ranks(options.sharding);
  return draw(options);
}

}  // namespace fovea::tools
