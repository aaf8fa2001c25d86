// The machine of the stand-in device: memory that the host must not touch, and streams that work later.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace stand_in {

constexpr int DEVICES = 4;

// Current device of this thread, and its current stream of each device.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
c10::StreamId current_stream(c10::DeviceIndex index);
c10::StreamId exchange_stream(c10::DeviceIndex index, c10::StreamId id);
c10::StreamId new_stream(c10::DeviceIndex index);

// A stream: work in its order, by a thread of its own, each piece a while after it could begin.
class Queue {
 public:
  Queue(c10::DeviceIndex device, c10::StreamId id);
  void add(std::function<void()> work);
  bool is_empty();
  void wait();  // the host waits for all that was added so far
  int64_t added();
  bool has_done(int64_t count);  // whether the first `count` pieces are done

 private:
  void run();
  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  int64_t added_ = 0;
  int64_t done_ = 0;
  bool has_thread_ = false;
};

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id);
Queue& current_queue(c10::DeviceIndex device);
std::vector<Queue*> queues_of(c10::DeviceIndex device);
void synchronize(c10::DeviceIndex device);  // and raise what went wrong there
void raise_late_error(c10::DeviceIndex device);
void lose(c10::DeviceIndex device);  // from now on it is gone

// A point in a stream.
class Event {
 public:
  void record(c10::DeviceIndex device, c10::StreamId id);
  void block(c10::DeviceIndex device, c10::StreamId id);
  bool is_done();
  void wait();
  double seconds();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int64_t scheduled = 0;
    int64_t done = 0;
    double seconds = 0.0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// How late the streams are: seconds before each piece of work, by default streams and by others.
struct Lateness {
  std::atomic<double> main{0.0};
  std::atomic<double> side{0.0};
};
Lateness& lateness();

// Memory of the devices. Pages are closed to everybody but to work that has opened them.
struct Figures {
  int64_t allocated = 0;
  int64_t peak = 0;
  int64_t allocations = 0;
};
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
std::shared_ptr<void> held_pinned(const void* pointer);  // the block that a copy needs; null where it is none
void record_stream(const void* pointer, c10::DeviceIndex device, c10::StreamId id);
Figures figures(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_limit(c10::DeviceIndex device, int64_t bytes);  // 0: none
int64_t limit(c10::DeviceIndex device);

// Opens the blocks that pointers lie in, while it lives.
class Opened {
 public:
  explicit Opened(std::vector<const void*> pointers);
  ~Opened();
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

 private:
  std::vector<const void*> pointers_;
};

// The host learned something of the device, and waited for it.
void host_reads(const std::string& what);

}  // namespace stand_in
