// Checks of the arrays that XLA hands to a handler: element types and sizes, and an error that names the first wrong one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jmx {

constexpr int64_t kAnySize = -1;

// A handler reads no size of an array, and no element, before the array was required here and `failed` was asked.
//
// Element types are compared as such, not by `xla::ffi::ByteWidth`: that is 1 for elements of 1, 2 and 4 bits too, of
// which XLA packs several into a byte.
class Arguments {
 public:
  using Array = xla::ffi::AnyBuffer;
  using Types = std::initializer_list<xla::ffi::DataType>;
  using Shape = std::vector<int64_t>;

  explicit Arguments(const char* handler) : handler_(handler) {}

  void Require(const char* name, Array array, Types types, const Shape& shape) {
    RequireType(name, array, types);
    const auto sizes = array.dimensions();
    const auto fits = [](int64_t size, int64_t wanted) { return wanted == kAnySize || size == wanted; };
    if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end(), fits))
      Fail(Named(name, array) + " must have the shape " + Text(shape));
  }

  // An array that a call may lack has no elements then, in any number of axes.
  void RequireOrEmpty(const char* name, Array array, Types types, const Shape& shape) {
    if (array.element_count() != 0) Require(name, array, types, shape);
    else RequireType(name, array, types);
  }

  void RequireEmpty(const char* name, Array array, Types types) {
    RequireType(name, array, types);
    if (array.element_count() != 0) Fail(Named(name, array) + " must be empty in this call");
  }

  // `what` says which argument is wrong, its value and the rule.
  void Fail(const std::string& what) {
    if (!fault_) fault_ = std::string(handler_) + ": " + what;
  }

  bool failed() const { return fault_.has_value(); }

  xla::ffi::Error error() const {
    return fault_ ? xla::ffi::Error::InvalidArgument(*fault_) : xla::ffi::Error::Success();
  }

  // "`x` (F32 (4, 64))"
  static std::string Named(const char* name, Array array) {
    std::ostringstream text;
    text << "`" << name << "` (" << array.element_type() << " " << Text(array.dimensions()) << ")";
    return text.str();
  }

 private:
  void RequireType(const char* name, Array array, Types types) {
    if (std::find(types.begin(), types.end(), array.element_type()) != types.end()) return;
    std::ostringstream text;
    text << Named(name, array) << " must be of type ";
    for (const auto* type = types.begin(); type != types.end(); ++type)
      text << (type == types.begin() ? "" : type + 1 == types.end() ? " or " : ", ") << *type;
    Fail(text.str());
  }

  template <typename Sizes>
  static std::string Text(const Sizes& sizes) {
    std::string text;
    for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + (size == kAnySize ? "*" : std::to_string(size));
    return "(" + text + ")";
  }

  const char* handler_;
  std::optional<std::string> fault_;
};

}  // namespace jmx
