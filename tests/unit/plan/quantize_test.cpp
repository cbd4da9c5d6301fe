// Public quantisers: codes times scales are what attention multiplies, in the layouts that the header says.
#include "fovea/quantize.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fovea/attention.hpp"

#include "quant/formats.hpp"
#include "quant/groups.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kBatch = 2, kRows = 70, kHeads = 3, kDim = 16;

std::vector<float> drawn(std::uint64_t stream,
                         std::int64_t count = kBatch * kRows * kHeads * kDim) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(Random(5, stream).normal(i)) +
                     static_cast<float>(i % kDim == 3 ? 4 : 0));
  return values;
}

struct Rounded {
  std::vector<std::int8_t> codes;
  std::vector<float> scales, mean;
};

/// By heads first: any strides are taken.
TensorView by_heads(std::vector<float>& x) {
  return view(x.data(), {kBatch, kRows, kHeads, kDim},
              {kHeads * kRows * kDim, kDim, kRows * kDim, 1});
}

std::size_t offset(std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t d) {
  return static_cast<std::size_t>(((batch * kHeads + head) * kRows + row) * kDim + d);
}

Rounded round_k(std::vector<float>& k, const Quantization& quant) {
  Rounded r{
      std::vector<std::int8_t>(k.size()),
      std::vector<float>(static_cast<std::size_t>(kBatch * kHeads * num_k_scales(quant, kRows))),
      std::vector<float>(static_cast<std::size_t>(kBatch * kHeads * kDim))};
  quantize_k({.k = by_heads(k),
              .codes = view(r.codes.data(), {kBatch, kRows, kHeads, kDim},
                            {kHeads * kRows * kDim, kDim, kRows * kDim, 1}),
              .scales = view(r.scales.data(), {kBatch, kHeads, num_k_scales(quant, kRows)}),
              .mean = view(r.mean.data(), {kBatch, kHeads, kDim}),
              .quant = quant});
  return r;
}

Rounded round_q(std::vector<float>& q, const Quantization& quant) {
  Rounded r{
      std::vector<std::int8_t>(q.size()),
      std::vector<float>(static_cast<std::size_t>(kBatch * kHeads * num_q_scales(quant, kRows))),
      {}};
  quantize_q({.q = by_heads(q),
              .codes = view(r.codes.data(), {kBatch, kRows, kHeads, kDim},
                            {kHeads * kRows * kDim, kDim, kRows * kDim, 1}),
              .scales = view(r.scales.data(), {kBatch, kHeads, num_q_scales(quant, kRows)}),
              .quant = quant});
  return r;
}

/// lse of attention, from the public codes.
TEST(Quantizers, GiveTheCodesThatAttentionMultiplies) {
  for (const char* recipe :
       {"accurate", "int8", "sage2",
        "qk=int8,q_scales=block,k_scales=block,block_kv=64,smooth_k=sequence"}) {
    Quantization quant = parse_quantization(recipe);
    quant.pv = QuantFormat::none;
    quant.smooth_v = Smoothing::none;
    std::vector<float> q = drawn(1), k = drawn(2), out(q.size()),
                       lse(static_cast<std::size_t>(kBatch * kHeads * kRows));
    attention_forward({.q = by_heads(q),
                       .k = by_heads(k),
                       .v = by_heads(k),
                       .out = by_heads(out),
                       .lse = view(lse.data(), {kBatch, kHeads, kRows}),
                       .quant = quant});
    const Rounded rq = round_q(q, quant), rk = round_k(k, quant);
    for (std::int64_t batch = 0; batch < kBatch; ++batch) {
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const std::int64_t which = batch * kHeads + head;
        for (std::int64_t i = 0; i < kRows; i += 23) {
          double sum = 0;
          for (std::int64_t j = 0; j < kRows; ++j) {
            int product = 0;
            double shift = 0;
            for (std::int64_t d = 0; d < kDim; ++d) {
              product += rq.codes[offset(batch, i, head, d)] * rk.codes[offset(batch, j, head, d)];
              shift += static_cast<double>(q[offset(batch, i, head, d)]) *
                       rk.mean[static_cast<std::size_t>(which * kDim + d)];
            }
            const double q_scale = rq.scales[static_cast<std::size_t>(
                which * num_q_scales(quant, kRows) + quant::q_group(quant, i))];
            const double k_scale = rk.scales[static_cast<std::size_t>(
                which * num_k_scales(quant, kRows) + quant::k_group(quant, j))];
            sum += std::exp(0.25 * (product * q_scale * k_scale + shift));
          }
          EXPECT_NEAR(lse[static_cast<std::size_t>(which * kRows + i)], std::log(sum), 1e-5)
              << recipe;
        }
      }
    }
  }
}

TEST(Quantizers, WriteValuesByRowsAndByColumns) {
  const Quantization quant = parse_quantization("pv=e4m3,v_scales=channel,smooth_v=sequence");
  std::vector<float> v = drawn(3), scales(static_cast<std::size_t>(kBatch * kHeads * kDim)),
                     mean(scales.size());
  std::vector<std::uint8_t> rows(v.size(), 0xff);
  constexpr std::int64_t kPadded = 96;
  std::vector<std::uint8_t> columns(static_cast<std::size_t>(kBatch * kHeads * kDim * kPadded),
                                    0xff);
  QuantizeV args{.v = by_heads(v),
                 .codes = view(rows.data(), {kBatch, kRows, kHeads, kDim}),
                 .scales = view(scales.data(), {kBatch, kHeads, 1, kDim}),
                 .mean = view(mean.data(), {kBatch, kHeads, kDim}),
                 .quant = quant};
  quantize_v(args);
  args.codes = view(columns.data(), {kBatch, kHeads, kDim, kPadded});
  args.layout = ValueLayout::columns;
  quantize_v(args);
  constexpr std::int64_t kOrder[] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  for (std::int64_t head = 0; head < kBatch * kHeads; ++head) {
    const std::int64_t batch = head / kHeads;
    for (std::int64_t d = 0; d < kDim; ++d) {
      const auto channel = static_cast<std::size_t>(head * kDim + d);
      double sum = 0;
      float greatest = 0;
      for (std::int64_t n = 0; n < kRows; ++n) sum += v[offset(batch, n, head % kHeads, d)];
      EXPECT_FLOAT_EQ(mean[channel], static_cast<float>(sum / kRows));
      for (std::int64_t n = 0; n < kRows; ++n)
        greatest =
            std::max(greatest, std::fabs(v[offset(batch, n, head % kHeads, d)] - mean[channel]));
      EXPECT_EQ(scales[channel], greatest / 448);
      for (std::int64_t place = 0; place < kPadded; ++place) {
        const std::int64_t n = place - place % 16 + kOrder[place % 16];
        const std::uint8_t code =
            columns[static_cast<std::size_t>((head * kDim + d) * kPadded + place)];
        if (n >= kRows) {
          EXPECT_EQ(code, 0);
          continue;
        }
        const float x = v[offset(batch, n, head % kHeads, d)] - mean[channel];
        EXPECT_EQ(code, quant::e4m3_bits(x * (1 / scales[channel])));
        EXPECT_EQ(code, rows[static_cast<std::size_t>(
                            ((batch * kRows + n) * kHeads + head % kHeads) * kDim + d)]);
      }
    }
  }
}

TEST(Quantizers, WriteMeansOfBlocksOfQ) {
  const Quantization quant = parse_quantization("qk=int8,smooth_q=block,block_q=32,q_scales=block");
  std::vector<float> q = drawn(4), means(static_cast<std::size_t>(kBatch * kHeads * 3 * kDim)),
                     scales(static_cast<std::size_t>(kBatch * kHeads * 3));
  std::vector<std::int8_t> codes(q.size());
  quantize_q({.q = by_heads(q),
              .codes = view(codes.data(), {kBatch, kRows, kHeads, kDim}),
              .scales = view(scales.data(), {kBatch, kHeads, 3}),
              .means = view(means.data(), {kBatch, kHeads, 3, kDim}),
              .quant = quant});
  double sum = 0;
  for (std::int64_t n = 64; n < kRows; ++n) sum += q[offset(1, n, 2, 5)];
  const float mean = means[static_cast<std::size_t>(((1 * kHeads + 2) * 3 + 2) * kDim + 5)];
  EXPECT_FLOAT_EQ(mean, static_cast<float>(sum / (kRows - 64)));
  const float scale = scales[static_cast<std::size_t>((1 * kHeads + 2) * 3 + 2)];
  EXPECT_NEAR(
      codes[static_cast<std::size_t>(((1 * kRows + 69) * kHeads + 2) * kDim + 5)] * scale + mean,
      q[offset(1, 69, 2, 5)], scale / 2 * 1.001F);
}

TEST(Quantizers, CountScalesOfWholeBlocks) {
  const Quantization warps = parse_quantization("qk=int8,q_scales=warp,block_q=64,warp_q=16");
  EXPECT_EQ(num_q_scales(warps, 65), 8);
  EXPECT_EQ(num_q_scales(parse_quantization("sage2"), 64), 32);
  EXPECT_EQ(num_k_scales(parse_quantization("sage2"), 129), 8);
  EXPECT_EQ(num_k_scales(parse_quantization("int8"), 129), 129);
  Quantization wrong = warps;
  wrong.block_q = 0;
  EXPECT_THROW(static_cast<void>(num_q_scales(wrong, 65)), InvalidArgument);
}

TEST(Quantizers, RefuseByName) {
  const auto refusal = [](const std::function<void(QuantizeK&)>& spoil) {
    static std::vector<float> k = drawn(2), scales(kBatch * kHeads * 8),
                              mean(kBatch * kHeads * kDim);
    static std::vector<std::int8_t> codes(k.size());
    const Quantization quant = parse_quantization("accurate");
    QuantizeK args{.k = by_heads(k),
                   .codes = view(codes.data(), {kBatch, kRows, kHeads, kDim}),
                   .scales = view(scales.data(), {kBatch, kHeads, num_k_scales(quant, kRows)}),
                   .mean = view(mean.data(), {kBatch, kHeads, kDim}),
                   .quant = quant};
    spoil(args);
    try {
      quantize_k(args);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("(not refused)");
  };
  EXPECT_EQ(refusal([](QuantizeK&) {}), "(not refused)");
  const std::pair<std::function<void(QuantizeK&)>, const char*> cases[] = {
      {[](QuantizeK& a) { a.k = {}; },
       "quantize_k: k is missing; expected f32, f16 or bf16 [batch, seqlen, heads, head_dim]"},
      {[](QuantizeK& a) { a.quant = {}; },
       "quantize_k: quant is none, which does not round k to codes of eight bits; expected "
       "quant.qk int8 or e4m3"},
      {[](QuantizeK& a) { a.quant = parse_quantization("nvfp4"); },
       "quant is nvfp4, which does not round k to codes of eight bits"},
      {[](QuantizeK& a) { a.quant = parse_quantization("fp8_static"); },
       "quant.scales is given; expected measured"},
      {[](QuantizeK& a) { a.quant.block_kv = 7; }, "quant.block_kv is 7"},
      {[](QuantizeK& a) { a.quant.qk = QuantFormat::e4m3; },
       "codes is i8 [2, 70, 3, 16]; expected u8 [2, 70, 3, 16]"},
      {[](QuantizeK& a) { a.codes = {}; }, "codes is missing"},
      {[](QuantizeK& a) { a.quant.k_scales = ScaleGranularity::token; },
       "scales is f32 [2, 3, 4]; expected f32 [2, 3, 70]"},
      {[](QuantizeK& a) { a.mean = {}; }, "mean is missing; expected a tensor to write"},
      {[](QuantizeK& a) { a.quant.smooth_k = Smoothing::none; }, "mean is given; expected none"},
      {[](QuantizeK& a) {
         a.mean = view(static_cast<float*>(const_cast<void*>(a.k.data())), {kBatch, kHeads, kDim});
       },
       "overlaps"},
  };
  for (const auto& [spoil, message] : cases) EXPECT_THAT(refusal(spoil), HasSubstr(message));
  std::vector<float> v = drawn(3), scales(kBatch * kHeads * kDim);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(kBatch * kHeads * kDim * 72));
  try {
    quantize_v({.v = by_heads(v),
                .codes = view(codes.data(), {kBatch, kHeads, kDim, 72}),
                .scales = view(scales.data(), {kBatch, kHeads, 1, kDim}),
                .layout = ValueLayout::columns,
                .quant = parse_quantization("pv=e4m3")});
    ADD_FAILURE() << "72 is no multiple of 16";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("quantize_v: codes is u8 [2, 3, 16, 72]; expected a last "
                                        "extent that is a multiple of 16 and at least 70"));
  }
}

}  // namespace
}  // namespace fovea::testing
