// CUDA's driver API, looked up at run time, so that neither building nor loading this library needs CUDA. Functions
// throw std::string, the reason of a failure.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <string>

namespace jmx {

// Types and signatures as in CUDA's ABI since CUDA 4.
using Status = int;
using Device = int;
using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;
using EventHandle = void*;
using Address = unsigned long long;
constexpr Status kPeerAccessAlreadyEnabled = 704;
constexpr unsigned kNonBlocking = 1;    // of a stream: it does not wait for the default stream
constexpr unsigned kDisableTiming = 2;  // of an event

struct LaunchAttribute {
  int id, padding;
  int value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// A function of libcuda.so.1, called like the pointer that it converts to.
template <typename Signature>
class DriverFunction {
 public:
  explicit DriverFunction(const char* name) {
    static void* const library = [] {
      void* opened = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
      if (opened == nullptr) throw std::string(dlerror());
      return opened;
    }();
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) throw std::string("libcuda.so.1 has no ") + name;
    function_ = reinterpret_cast<Signature*>(symbol);
  }
  operator Signature*() const { return function_; }

 private:
  Signature* function_;
};

struct Driver {
  DriverFunction<Status(Device*, int)> device_get{"cuDeviceGet"};
  DriverFunction<Status(Context*, Device)> retain{"cuDevicePrimaryCtxRetain"};
  DriverFunction<Status(Context)> push{"cuCtxPushCurrent_v2"};
  DriverFunction<Status(Context*)> pop{"cuCtxPopCurrent_v2"};
  DriverFunction<Status(int*, int, Device)> attribute{"cuDeviceGetAttribute"};
  DriverFunction<Status(int*, Device, Device)> can_access{"cuDeviceCanAccessPeer"};
  DriverFunction<Status(Context, unsigned)> enable_access{"cuCtxEnablePeerAccess"};
  DriverFunction<Status(Address*, size_t)> allocate{"cuMemAlloc_v2"};
  DriverFunction<Status(Address, unsigned, size_t)> fill{"cuMemsetD32_v2"};
  DriverFunction<Status()> synchronize{"cuCtxSynchronize"};
  DriverFunction<Status(Module*, const void*)> load{"cuModuleLoadData"};
  DriverFunction<Status(Function*, Module, const char*)> function{"cuModuleGetFunction"};
  DriverFunction<Status(Function, int, int)> set_attribute{"cuFuncSetAttribute"};
  DriverFunction<Status(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                        void**)>
      launch{"cuLaunchKernel"};
  DriverFunction<Status(const LaunchConfig*, Function, void**, void**)> launch_extended{"cuLaunchKernelEx"};
  DriverFunction<Status(Stream*, unsigned)> stream_create{"cuStreamCreate"};
  DriverFunction<Status(Stream, EventHandle, unsigned)> stream_wait{"cuStreamWaitEvent"};
  DriverFunction<Status(EventHandle*, unsigned)> event_create{"cuEventCreate"};
  DriverFunction<Status(EventHandle, Stream)> event_record{"cuEventRecord"};
  DriverFunction<Status(EventHandle)> event_destroy{"cuEventDestroy_v2"};
  DriverFunction<Status(Address, Address, size_t, Stream)> copy{"cuMemcpyDtoDAsync_v2"};
  DriverFunction<Status(Status, const char**)> error_string{"cuGetErrorString"};
};

inline const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

inline void Check(Status status, const char* what) {
  if (status == 0) return;
  const char* text = nullptr;
  driver().error_string(status, &text);
  throw std::string(what) + ": " + (text != nullptr ? text : "error " + std::to_string(status));
}

inline Device DeviceOf(int ordinal) {
  Device device = 0;
  Check(driver().device_get(&device, ordinal), "cuDeviceGet");
  return device;
}

// A GPU's primary context, which is XLA's, current on this thread.
class Current {
 public:
  explicit Current(int ordinal) {
    Check(driver().retain(&context_, DeviceOf(ordinal)), "cuDevicePrimaryCtxRetain");
    Check(driver().push(context_), "cuCtxPushCurrent");
  }
  ~Current() {
    Context popped = nullptr;
    driver().pop(&popped);
  }
  Current(const Current&) = delete;
  Context context() const { return context_; }

 private:
  Context context_ = nullptr;
};

}  // namespace jmx
