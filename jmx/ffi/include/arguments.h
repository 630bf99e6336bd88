// Checks the arrays that XLA passes to a handler: element types and shapes. The error names the first one that is
// wrong.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jmx {

constexpr int64_t kAnySize = -1;

// Adds `count` array arguments, at least one, to the binding of a handler.
template <int count, typename Binding>
auto BindArguments(Binding&& binding) {
  if constexpr (count == 1) return std::move(binding).template Arg<xla::ffi::AnyBuffer>();
  else return BindArguments<count - 1>(std::move(binding).template Arg<xla::ffi::AnyBuffer>());
}

// A handler reads the sizes and elements of an array only after requiring it here, and if `failed` returns false.
//
// Element types are compared, not their `xla::ffi::ByteWidth`: that is also 1 for elements of 1, 2 and 4 bits, of which
// XLA packs several into a byte.
class ArgumentChecker {
 public:
  using Array = xla::ffi::AnyBuffer;
  using Types = std::initializer_list<xla::ffi::DataType>;
  using Shape = std::vector<int64_t>;

  explicit ArgumentChecker(const char* handler) : handler_(handler) {}

  void Require(const char* name, Array array, Types types, const Shape& shape) {
    RequireType(name, array, types);
    const auto sizes = array.dimensions();
    const auto fits = [](int64_t size, int64_t wanted) { return wanted == kAnySize || size == wanted; };
    if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(), fits))
      InvalidArgument(Describe(name, array) + " must have the shape " + Text(shape));
  }

  // For an optional array: one that a call does not have is empty, of any shape.
  void RequireOrEmpty(const char* name, Array array, Types types, const Shape& shape) {
    if (array.element_count() != 0) Require(name, array, types, shape);
    else RequireType(name, array, types);
  }

  void RequireEmpty(const char* name, Array array, Types types) {
    RequireType(name, array, types);
    if (array.element_count() != 0) InvalidArgument(Describe(name, array) + " must be empty in this call");
  }

  // Keeps the first error only. `what` names the argument, its value and the rule.
  void InvalidArgument(const std::string& what) {
    if (!error_) error_ = std::string(handler_) + ": " + what;
  }

  bool failed() const { return error_.has_value(); }

  xla::ffi::Error error() const {
    return error_ ? xla::ffi::Error::InvalidArgument(*error_) : xla::ffi::Error::Success();
  }

  // "`x` (F32 (4, 64))"
  static std::string Describe(const char* name, Array array) {
    std::ostringstream text;
    text << "`" << name << "` (" << array.element_type() << " " << Text(array.dimensions()) << ")";
    return text.str();
  }

 private:
  void RequireType(const char* name, Array array, Types types) {
    if (std::find(types.begin(), types.end(), array.element_type()) != types.end()) return;
    std::ostringstream text;
    text << Describe(name, array) << " must be of type ";
    for (const auto* type = types.begin(); type != types.end(); ++type)
      text << (type == types.begin() ? "" : type + 1 == types.end() ? " or " : ", ") << *type;
    InvalidArgument(text.str());
  }

  template <typename Sizes>
  static std::string Text(const Sizes& sizes) {
    std::string text;
    for (const int64_t size : sizes)
      text += (text.empty() ? "" : ", ") + (size == kAnySize ? "*" : std::to_string(size));
    return "(" + text + ")";
  }

  const char* handler_;
  std::optional<std::string> error_;
};

}  // namespace jmx
