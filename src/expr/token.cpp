#include "expr/token.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "fovea/error.hpp"

namespace fovea::expr {

namespace {

constexpr std::uint64_t kTooLarge = std::uint64_t{1} << 32U;  // any literal beyond 32 bits

// Longer ones first.
constexpr std::string_view kSymbols[] = {"<=", ">=", "==", "!=", "&&", "||", "//", "<<", ">>", "+",
                                         "-",  "*",  "/",  "%",  "<",  ">",  "!",  "&",  "|",  "^",
                                         "~",  "?",  ":",  "(",  ")",  "[",  "]",  ",",  "=",  ";"};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

template <typename Predicate>
std::size_t length_while(std::string_view text, Predicate predicate) {
  std::size_t length = 0;
  while (length < text.size() && predicate(text[length])) ++length;
  return length;
}

std::string_view symbol_of(std::string_view word) {
  if (word == "and") return "&&";
  if (word == "or") return "||";
  if (word == "not") return "!";
  return {};
}

std::uint64_t int_of(std::string_view digits, int base) {
  std::uint64_t value = 0;
  const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  return result.ec == std::errc() && value < kTooLarge ? value : kTooLarge;
}

}  // namespace

void fail_at(std::size_t column, std::string_view argument, const std::string& message) {
  throw ParseError(fmt::format("{}: column {}: {}", argument, column, message), column);
}

std::string shown(std::string_view text) {
  constexpr std::size_t kMaxShown = 40;
  std::string result(text.substr(0, kMaxShown));
  for (char& c : result) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text.size() > kMaxShown ? result + "..." : result;
}

Token Lexer::taken(Token token, TokenKind kind, std::size_t length) {
  token.kind = kind;
  token.text = text_.substr(at_, length);
  at_ += length;
  return token;
}

Token Lexer::next() {
  at_ += length_while(text_.substr(at_), is_space);
  const std::string_view rest = text_.substr(at_);
  Token token;
  token.column = at_ + 1;
  if (rest.empty()) return token;
  if (is_digit(rest[0]) || (rest[0] == '.' && rest.size() > 1 && is_digit(rest[1])))
    return number();
  if (is_letter(rest[0])) {
    token = taken(token, TokenKind::name,
                  length_while(rest, [](char c) { return is_letter(c) || is_digit(c); }));
    const std::string_view symbol = symbol_of(token.text);
    if (symbol.empty()) return token;
    token.kind = TokenKind::symbol;
    token.text = symbol;
    return token;
  }
  for (const std::string_view symbol : kSymbols) {
    if (rest.starts_with(symbol)) return taken(token, TokenKind::symbol, symbol.size());
  }
  fail_at(token.column, argument_,
          fmt::format("unexpected character '{}'; expected a name, number or operator",
                      shown(rest.substr(0, 1))));
}

Token Lexer::number() {
  const std::string_view rest = text_.substr(at_);
  Token token;
  token.column = at_ + 1;
  if (rest.starts_with("0x") || rest.starts_with("0X")) return hexadecimal(token);

  std::size_t length = length_while(rest, is_digit);
  bool is_floating = false;
  if (length < rest.size() && rest[length] == '.') {
    is_floating = true;
    ++length;
    length += length_while(rest.substr(length), is_digit);
  }
  if (length < rest.size() && (rest[length] == 'e' || rest[length] == 'E')) {
    is_floating = true;
    ++length;
    if (length < rest.size() && (rest[length] == '+' || rest[length] == '-')) ++length;
    const std::size_t num_digits = length_while(rest.substr(length), is_digit);
    if (num_digits == 0) {
      fail_at(token.column, argument_,
              fmt::format("malformed number '{}'; expected digits after the exponent",
                          shown(rest.substr(0, length))));
    }
    length += num_digits;
  }
  token = taken(token, is_floating ? TokenKind::floating : TokenKind::integer, length);
  refuse_letters_after(token);
  if (!is_floating) {
    token.int_value = int_of(token.text, 10);
    return token;
  }
  // Straight to fp32: by way of fp64 a decimal next to the middle of two floats would be rounded
  // twice.
  float value = 0;
  const char* end = token.text.data() + token.text.size();
  if (std::from_chars(token.text.data(), end, value).ec == std::errc::result_out_of_range) {
    double wide = 0;
    const bool is_tiny = std::from_chars(token.text.data(), end, wide).ec == std::errc()
                             ? std::abs(wide) < 1
                             : token.text.find("e-") != std::string_view::npos ||
                                   token.text.find("E-") != std::string_view::npos;
    if (!is_tiny) {
      fail_at(token.column, argument_,
              fmt::format("the number {} is beyond fp32; expected at most 3.4028235e+38, or inf",
                          shown(token.text)));
    }
    value = static_cast<float>(wide);
  }
  token.float_value = value;
  return token;
}

Token Lexer::hexadecimal(Token token) {
  const auto is_hex = [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
  };
  token = taken(token, TokenKind::integer, 2 + length_while(text_.substr(at_ + 2), is_hex));
  refuse_letters_after(token);
  if (token.text.size() == 2) {
    fail_at(token.column, argument_,
            fmt::format("malformed number '{}'; expected hexadecimal digits", token.text));
  }
  token.is_hexadecimal = true;
  token.int_value = int_of(token.text.substr(2), 16);
  return token;
}

void Lexer::refuse_letters_after(const Token& token) const {
  const std::size_t length = length_while(
      text_.substr(at_), [](char c) { return is_letter(c) || is_digit(c) || c == '.'; });
  if (length == 0) return;
  fail_at(token.column, argument_,
          fmt::format("malformed number '{}{}'; expected digits, as in 3, 0x1f, 3.0 or 1e-3",
                      shown(token.text), shown(text_.substr(at_, length))));
}

}  // namespace fovea::expr
