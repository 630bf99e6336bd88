// The GPUs of this process, and those of them that exchange rows. Functions throw std::string, the reason of a failure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"

namespace jmx {

inline void CheckAccess(int from, int to) {
  int can = 0;
  Check(driver().can_access(&can, DeviceOf(from), DeviceOf(to)), "cuDeviceCanAccessPeer");
  if (!can) throw "GPU " + std::to_string(from) + " cannot access the memory of GPU " + std::to_string(to);
}

// Lets GPU `ordinal`, which is current, access the memory of another one.
inline void EnableAccess(int ordinal, int other) {
  if (ordinal == other) return;
  Context context = nullptr;
  {
    Current there(other);
    context = there.context();
  }
  CheckAccess(ordinal, other);
  const Status status = driver().enable_access(context, 0);
  if (status != kPeerAccessAlreadyEnabled) Check(status, "cuCtxEnablePeerAccess");
}

// GPUs that exchange rows with each other, by rank.
struct Group {
  std::vector<int> ordinals;
  int rank = 0;  // of this GPU
  int size() const { return static_cast<int>(ordinals.size()); }
};

// That of a GPU among `devices`, where those of a group are beside each other.
inline Group GroupOf(int ordinal, const int64_t* begin, const int64_t* end, int64_t num_ranks, int max_ranks) {
  if (num_ranks < 2 || num_ranks > max_ranks || (end - begin) % num_ranks != 0) throw std::string("wrong ranks");
  const int64_t* mine = std::find(begin, end, int64_t{ordinal});
  if (mine == end) throw "GPU " + std::to_string(ordinal) + " is not among those of the mesh";
  const ptrdiff_t rank = (mine - begin) % num_ranks;
  return {{mine - rank, mine - rank + num_ranks}, static_cast<int>(rank)};
}

}  // namespace jmx
