// The XLA FFI handlers by which copy engines send rows between the GPUs of one process, while their SMs compute:
// `start` has each rank's rows copied into the others' results, on streams of its own, and `finish` makes XLA's stream
// wait for all copies from and to a rank. XLA keeps the memory of both arrays between the two, as `finish` has them as
// operands.
//
// Streams wait for each other by events, which have to be recorded before another thread waits for them. So the threads
// of the ranks, one for each GPU, meet twice in `start`: to give each other the addresses of results, and events after
// which these may be written; and to give each other the events after the copies.
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "gpus.h"
#include "launching.h"
#include "region.h"
#include "try.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr auto kTimeout = std::chrono::seconds(300);  // for which a rank waits for the threads of the others

// A point in the work of a stream, of the GPU that is current.
class Event {
 public:
  static Event Record(Stream stream) {
    EventHandle handle = nullptr;
    Check(driver().event_create(&handle, kDisableTiming), "cuEventCreate");
    Event event(handle);
    Check(driver().event_record(handle, stream), "cuEventRecord");
    return event;
  }
  Event() = default;
  // The stream does nothing more before that point, if there is one.
  void Hold(Stream stream) const {
    if (handle_ != nullptr) Check(driver().stream_wait(stream, handle_.get(), 0), "cuStreamWaitEvent");
  }

 private:
  explicit Event(EventHandle handle) : handle_(handle, [](EventHandle its) { driver().event_destroy(its); }) {}
  std::shared_ptr<void> handle_;
};

// What a rank gives the others.
struct Post {
  Address results = 0;
  std::vector<Event> events;  // one, or one for each rank, none where nothing is sent
};

// Where the threads of the ranks meet.
class Meetings {
 public:
  using Key = std::pair<int64_t, std::vector<int>>;  // an execution of a program, and GPUs

  // The posts of all ranks, by rank, when all have come. Each comes equally often.
  std::vector<Post> Meet(const Key& key, const Group& group, Post mine) {
    std::unique_lock lock(mutex_);
    const auto wait = [&](auto&& until) {
      if (!changed_.wait_for(lock, kTimeout, until)) throw std::string("the threads of other GPUs did not come");
    };
    wait([&] {  // those who met here before have left
      const auto found = meetings_.find(key);
      return found == meetings_.end() || !found->second.posts[group.rank];
    });
    Meeting& meeting = meetings_[key];
    meeting.posts.resize(group.size());
    meeting.posts[group.rank] = std::move(mine);
    ++meeting.num_here;
    changed_.notify_all();
    wait([&] { return meeting.num_here == group.size(); });
    std::vector<Post> posts;
    for (const auto& post : meeting.posts) posts.push_back(*post);
    if (++meeting.num_left == group.size()) {
      meetings_.erase(key);
      changed_.notify_all();
    }
    return posts;
  }

 private:
  struct Meeting {
    std::vector<std::optional<Post>> posts;
    int num_here = 0, num_left = 0;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Meeting> meetings_;
};

// What the process has. It is never freed: a program may be launched at any time.
struct Resources {
  Meetings meetings;
  std::mutex mutex;
  std::map<std::pair<int, int>, Stream> streams;  // by the GPU that sends, and the one that receives
  std::map<std::pair<int, Address>, std::vector<Event>> copies;        // that were started, by GPU and its results

  static Resources& Get() {
    static auto* resources = new Resources;  // not destroyed while other threads may still run
    return *resources;
  }

  Stream FindStream(int from, int to) {
    std::lock_guard lock(mutex);
    Stream& stream = streams[{from, to}];
    if (stream != nullptr) return stream;
    Current current(from);
    EnableAccess(from, to);
    Check(driver().stream_create(&stream, kNonBlocking), "cuStreamCreate");
    return stream;
  }
};

Address AddressOf(const void* data) { return reinterpret_cast<Address>(data); }

// Sends each rank, this one if `own`, the bytes of `in` from `begin` on that an nth of `out` has, or an nth of them
// (`parts`).
void StartCopies(Stream stream, int ordinal, int64_t run, const Group& group, bool parts, size_t begin, bool own,
                 ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out) {
  Resources& resources = Resources::Get();
  Current current(ordinal);
  const size_t bytes = out->size_bytes() / group.size(), step = parts ? bytes : 0;
  if (begin + bytes + step * (group.size() - 1) > in.size_bytes()) throw std::string("wrong sizes");
  const Address from = AddressOf(in.untyped_data()) + begin;
  const Post begun{AddressOf(out->untyped_data()), {Event::Record(stream)}};
  const Meetings::Key key{run, group.ordinals};
  const std::vector<Post> ready = resources.meetings.Meet(key, group, begun);
  Post sent{0, std::vector<Event>(group.size())};
  for (int i = own ? 0 : 1; i < group.size(); ++i) {
    const int other = (group.rank + i) % group.size();
    const Stream copies = resources.FindStream(ordinal, group.ordinals[other]);
    begun.events[0].Hold(copies);
    if (other != group.rank) ready[other].events[0].Hold(copies);
    Check(driver().copy(ready[other].results + group.rank * bytes, from + other * step, bytes, copies),
          "cuMemcpyDtoDAsync");
    sent.events[other] = Event::Record(copies);
  }
  const std::vector<Post> done = resources.meetings.Meet(key, group, sent);
  std::vector<Event> events = sent.events;
  for (const Post& post : done) events.push_back(post.events[group.rank]);
  std::lock_guard lock(resources.mutex);
  resources.copies[{ordinal, begun.results}] = std::move(events);
}

// It waits for nothing where XLA's collective ran in `start`: this GPU has started no copies then. With others on the
// way it cannot tell that from an array that XLA has moved, which is an error.
void FinishCopies(Stream stream, int ordinal, Address results) {
  Resources& resources = Resources::Get();
  std::vector<Event> events;
  {
    std::lock_guard lock(resources.mutex);
    const auto found = resources.copies.find({ordinal, results});
    if (found == resources.copies.end()) {
      const auto any = resources.copies.lower_bound({ordinal, 0});
      if (any == resources.copies.end() || any->first.first != ordinal) return;
      throw std::string("no copies were started to this array");
    }
    events = std::move(found->second);
    resources.copies.erase(found);
  }
  Current current(ordinal);
  for (const Event& event : events) event.Hold(stream);
}

ffi::Error Initialize(int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, bool, int64_t,
                      bool, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    for (int other : group.ordinals) Resources::Get().FindStream(ordinal, other);
  });
}

ffi::Error Start(int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, bool parts, int64_t begin,
                 bool own, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out, Stream stream, ffi::RunId run) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    StartCopies(stream, ordinal, run.run_id, group, parts, begin, own, in, out);
  });
}

// Operands are the array that is sent, and the results, which it returns where they are.
ffi::Error Finish(int32_t ordinal, Stream stream, ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> results) {
  return Try("jmx_peer", [&] { FinishCopies(stream, ordinal, AddressOf(results->untyped_data())); });
}

template <typename Binding>
auto BindStart(Binding&& binding) {
  return BindGroup(std::move(binding))
      .template Attr<bool>("parts")
      .template Attr<int64_t>("begin")
      .template Attr<bool>("own")
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
}

}  // namespace
}  // namespace jmx

// None of them can be a part of a CUDA graph, which would not meet the other ranks.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_peer_start_initialize, jmx::Initialize,
                              jmx::BindStart(jmx::ffi::Ffi::BindInitialize()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmx_peer_start, jmx::Start,
    jmx::BindStart(jmx::ffi::Ffi::Bind()).Ctx<jmx::ffi::PlatformStream<jmx::Stream>>().Ctx<jmx::ffi::RunId>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_peer_finish, jmx::Finish,
                              jmx::ffi::Ffi::Bind()
                                  .Ctx<jmx::ffi::DeviceOrdinal>()
                                  .Ctx<jmx::ffi::PlatformStream<jmx::Stream>>()
                                  .Arg<jmx::ffi::AnyBuffer>()
                                  .Arg<jmx::ffi::AnyBuffer>()
                                  .Ret<jmx::ffi::AnyBuffer>());
