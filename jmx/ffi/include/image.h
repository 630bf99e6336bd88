// The kernels of a library that were compiled together, which each GPU loads once. Functions throw std::string, the
// reason of a failure.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include "driver.h"

namespace jmx {

class Image {
 public:
  void Set(const char* data, size_t size) {
    std::lock_guard lock(mutex_);
    data_.assign(data, size);
  }

  Module ModuleOf(int ordinal) {
    std::lock_guard lock(mutex_);
    Module& module = modules_[ordinal];
    if (module != nullptr) return module;
    if (data_.empty()) throw std::string("the kernels were not compiled in this process");
    const Current current(ordinal);
    Check(driver().load(&module, data_.data()), "cuModuleLoadData");
    return module;
  }

 private:
  std::mutex mutex_;
  std::string data_;
  std::map<int, Module> modules_;
};

}  // namespace jmx
