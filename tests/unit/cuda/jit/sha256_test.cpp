#include "cuda/jit/sha256.hpp"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace fovea::cuda::jit {
namespace {

std::string hex_of(std::string_view text) { return to_hex(sha256(std::as_bytes(std::span(text)))); }

// FIPS 180-4, the examples of one and two chunks, and the empty text.
TEST(Sha256, GivesTheDigestsOfTheStandard) {
  EXPECT_EQ(hex_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex_of(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Lengths around a chunk's end, where the padding takes a chunk of its own.
TEST(Sha256, PiecesGiveTheDigestOfTheWhole) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{55}, std::size_t{56}, std::size_t{63},
        std::size_t{64}, std::size_t{65}, std::size_t{200}}) {
    const std::string text(size, 'x');
    for (const std::size_t cut : {std::size_t{0}, size / 3, size}) {
      Sha256Hasher hasher;
      hasher.add_bytes(std::as_bytes(std::span(text)).first(cut));
      hasher.add_bytes(std::as_bytes(std::span(text)).subspan(cut));
      EXPECT_EQ(to_hex(hasher.finish()), hex_of(text)) << size << ", " << cut;
    }
  }
}

TEST(Sha256, TextsDoNotRunTogether) {
  Sha256Hasher one, two;
  one.add_text("ab");
  one.add_text("c");
  two.add_text("a");
  two.add_text("bc");
  EXPECT_NE(one.finish(), two.finish());
}

}  // namespace
}  // namespace fovea::cuda::jit
