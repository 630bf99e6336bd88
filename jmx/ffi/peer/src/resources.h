// What this process has on its GPUs for all calls. Functions throw std::string, the reason of a failure.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpus.h"
#include "image.h"
#include "region.h"

namespace jmx {

// The kernels of one CUDA source, by GPU and name.
class Kernels {
 public:
  Image image;

  Function Find(int ordinal, const std::string& name) {
    std::lock_guard lock(mutex_);
    if (auto found = functions_.find({ordinal, name}); found != functions_.end()) return found->second;
    const Module module = image.ModuleOf(ordinal);
    const Current current(ordinal);
    Function function = nullptr;
    Check(driver().function(&function, module, name.c_str()), "cuModuleGetFunction");
    return functions_[{ordinal, name}] = function;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, std::string>, Function> functions_;
};

// What the process has: kernels, and regions. It is never freed: a program may be launched at any time.
class Resources {
 public:
  static Resources& Get() {
    static auto* resources = new Resources;  // not destroyed while other threads may still run
    return *resources;
  }

  // The kernels of a source, such as "kernels.cu".
  Kernels& KernelsOf(const std::string& source) {
    std::lock_guard lock(mutex_);
    return kernels_[source];
  }

  // The regions of ranks, by rank, of calls of one kind. They are made when the first of these GPUs asks.
  const std::vector<Address>& FindRegions(const std::string& kind, const std::vector<int>& ordinals,
                                          size_t slot_bytes) {
    std::lock_guard lock(mutex_);
    auto& regions = regions_[{kind, ordinals, slot_bytes}];
    if (!regions.empty()) return regions;
    std::vector<Address> made;
    const size_t bytes = kSlots + 2 * ordinals.size() * slot_bytes;
    for (int ordinal : ordinals) {
      Current current(ordinal);
      for (int other : ordinals) EnableAccess(ordinal, other);
      Address address = 0;
      Check(driver().allocate(&address, bytes), "cuMemAlloc");
      Check(driver().fill(address, 0, bytes / 4), "cuMemsetD32");
      Check(driver().synchronize(), "cuCtxSynchronize");
      made.push_back(address);
    }
    return regions = made;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, Kernels> kernels_;
  std::map<std::tuple<std::string, std::vector<int>, size_t>, std::vector<Address>> regions_;
};

}  // namespace jmx
