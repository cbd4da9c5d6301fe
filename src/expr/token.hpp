// Words of the text form. parse.cpp makes a formula of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fovea::expr {

enum class TokenKind : std::uint8_t { end, name, symbol, integer, floating };

struct Token {
  TokenKind kind = TokenKind::end;
  std::string_view text;        // `and`, `or`, `not` are spelled &&, ||, !
  std::size_t column = 1;       // 1-based, in bytes
  std::uint64_t int_value = 0;  // integer: at most 2^32
  bool is_hexadecimal = false;
  double float_value = 0;
};

/// Throws ParseError: "score_mod: column 9: message".
[[noreturn]] void fail_at(std::size_t column, std::string_view argument,
                          const std::string& message);

/// What to show of user text in a message: at most 40 bytes, control characters replaced.
std::string shown(std::string_view text);

class Lexer {
 public:
  Lexer(std::string_view text, std::string_view argument) : text_(text), argument_(argument) {}
  /// Throws InvalidArgument at a character or number that no formula has.
  Token next();

 private:
  Token number();
  Token hexadecimal(Token token);
  void refuse_letters_after(const Token& token) const;
  Token taken(Token token, TokenKind kind, std::size_t length);

  std::string_view text_;
  std::string_view argument_;
  std::size_t at_ = 0;
};

}  // namespace fovea::expr
