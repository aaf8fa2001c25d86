#include "runtime.h"

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <unordered_map>

namespace stand_in {

namespace {

constexpr size_t PAGE = 4096;

thread_local c10::DeviceIndex device_here = 0;
thread_local c10::StreamId streams_here[DEVICES] = {};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What outlives static destructors, because threads still work when a process ends.
struct Streams {
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, std::unique_ptr<Queue>> queues;
  c10::StreamId last = 0;
};
Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

struct Errors {
  std::mutex mutex;
  std::map<int, std::string> by_device;
  std::set<int> gone;
};
Errors& errors() {
  static auto* all = new Errors;
  return *all;
}

struct Block {
  char* base;
  size_t bytes;      // whole pages, a power of two of them
  size_t requested;  // what is counted
  c10::DeviceIndex device;
  c10::StreamId stream;  // whose order it is freed in
  std::set<c10::StreamId> also;
  int open = 0;
};

class Memory {
 public:
  Block* take(size_t bytes) {
    const auto device = current_device();
    const auto stream = current_stream(device);
    size_t pages = PAGE;
    while (pages < bytes) pages *= 2;
    std::lock_guard<std::mutex> lock(mutex_);
    collect();
    auto& counted = figures_[device];
    const int64_t rounded = static_cast<int64_t>((bytes + 511) / 512 * 512);
    if (limits_[device] && counted.allocated + rounded > limits_[device]) {
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "standin:", static_cast<int>(device), " is out of memory: tried to allocate ", rounded,
          " bytes beside ", counted.allocated, " of ", limits_[device]);
    }
    Block* block = nullptr;
    auto& free = free_[{device, stream, pages}];
    if (!free.empty()) {
      block = free.back();  // the newest: whoever still reads it finds out
      free.pop_back();
    } else {
      void* base = mmap(nullptr, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(base != MAP_FAILED, "mmap of ", pages, " bytes failed");
      block = new Block{static_cast<char*>(base), pages, 0, device, stream, {}, 0};
      blocks_[block->base] = block;
    }
    block->requested = static_cast<size_t>(rounded);
    counted.allocated += rounded;
    counted.peak = std::max(counted.peak, counted.allocated);
    counted.allocations += 1;
    return block;
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    figures_[block->device].allocated -= static_cast<int64_t>(block->requested);
    std::vector<std::pair<Queue*, int64_t>> until;
    for (auto stream : block->also) {
      auto& queue = queue_of(block->device, stream);
      until.emplace_back(&queue, queue.added());
    }
    block->also.clear();
    waiting_.push_back({block, until});
    collect();
  }

  Block* find(const void* pointer) {
    auto place = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (place == blocks_.begin()) return nullptr;
    Block* block = std::prev(place)->second;
    return static_cast<const char*>(pointer) <= block->base + block->bytes ? block : nullptr;
  }

  void record(const void* pointer, c10::StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = find(pointer);
    if (block && block->stream != stream) block->also.insert(stream);
  }

  void open(const void* pointer, int by) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = find(pointer);
    if (!block) return;
    const bool was = block->open > 0;
    block->open += by;
    if (was != (block->open > 0)) mprotect(block->base, block->bytes, block->open ? PROT_READ | PROT_WRITE : PROT_NONE);
  }

  Figures& figures(c10::DeviceIndex device) { return figures_[device]; }
  int64_t& limit(c10::DeviceIndex device) { return limits_[device]; }
  std::mutex& mutex() { return mutex_; }

 private:
  void collect() {  // blocks that no other stream can be at work on any more
    std::vector<Waiting> still;
    for (auto& one : waiting_) {
      bool done = true;
      for (auto& [queue, count] : one.until) done = done && queue->has_done(count);
      if (done) {
        free_[{one.block->device, one.block->stream, one.block->bytes}].push_back(one.block);
      } else {
        still.push_back(one);
      }
    }
    waiting_.swap(still);
  }

  struct Waiting {
    Block* block;
    std::vector<std::pair<Queue*, int64_t>> until;
  };
  std::mutex mutex_;
  std::map<char*, Block*> blocks_;
  std::map<std::tuple<int, c10::StreamId, size_t>, std::vector<Block*>> free_;
  std::vector<Waiting> waiting_;
  Figures figures_[DEVICES];
  int64_t limits_[DEVICES] = {};
};

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, current_device());
    if (bytes == 0) return {nullptr, nullptr, &free, device};
    Block* block = memory().take(bytes);
    char* base = block->base;
    // What was there before is nobody's; from now on, in the order of this stream, it is NaN.
    current_queue(device.index()).add([base, bytes] {
      Opened opened({base});
      std::memset(base, 0xff, bytes);
    });
    return {base, block, &free, device};
  }
  static void free(void* block) {
    if (block) memory().give_back(static_cast<Block*>(block));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t count) const override {
    Opened opened({to, from});
    std::memcpy(to, from, count);
  }
};

// A block of page-locked memory is held by its tensor and by each copy that is on its way, as that of CUDA is.
struct PinnedBlock {
  size_t bytes;
  std::shared_ptr<void> memory;
};
struct Pinned {
  std::mutex mutex;
  std::map<const char*, PinnedBlock> blocks;
  auto find(const void* pointer) {
    auto place = blocks.upper_bound(static_cast<const char*>(pointer));
    if (place == blocks.begin()) return blocks.end();
    --place;
    return static_cast<const char*>(pointer) < place->first + std::max<size_t>(place->second.bytes, 1) ? place : blocks.end();
  }
};
Pinned& pinned() {
  static auto* all = new Pinned;
  return *all;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* base = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks[base] = {bytes, std::shared_ptr<void>(base, std::free)};
    return {base, base, &free, c10::Device(c10::DeviceType::CPU)};
  }
  static void free(void* base) {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.erase(static_cast<char*>(base));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

}  // namespace

c10::DeviceIndex current_device() { return device_here; }
void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < DEVICES, "there is no device standin:", static_cast<int>(index));
  device_here = index;
}
c10::StreamId current_stream(c10::DeviceIndex index) { return streams_here[index]; }
c10::StreamId exchange_stream(c10::DeviceIndex index, c10::StreamId id) { return std::exchange(streams_here[index], id); }
c10::StreamId new_stream(c10::DeviceIndex index) {
  c10::StreamId id = 0;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    id = ++streams().last;
  }
  queue_of(index, id);
  return id;
}

Queue& queue_of(c10::DeviceIndex device, c10::StreamId id) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& queue = streams().queues[{device, id}];
  if (!queue) queue = std::make_unique<Queue>(device, id);
  return *queue;
}

// As an accelerator's library tells of its errors.
[[noreturn]] void raise(c10::DeviceIndex device, const std::string& before, const std::string& after) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1, before + "standin:" + std::to_string(device) + after);
}

bool is_gone(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(errors().mutex);
  return errors().gone.count(device) > 0;
}

void lose(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(errors().mutex);
  errors().gone.insert(device);
}

Queue& current_queue(c10::DeviceIndex device) {
  if (is_gone(device)) raise(device, "", " is gone");
  return queue_of(device, current_stream(device));
}

std::vector<Queue*> queues_of(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  std::vector<Queue*> found;
  for (auto& [key, queue] : streams().queues)
    if (key.first == device) found.push_back(queue.get());
  return found;
}

Queue::Queue(c10::DeviceIndex device, c10::StreamId id) : device_(device), id_(id) {}

void Queue::add(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([this] { run(); }).detach();
  }
  work_.push_back(std::move(work));
  added_ += 1;
  changed_.notify_all();
}

void Queue::run() {
  device_here = device_;
  streams_here[device_] = id_;
  while (true) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      work = std::move(work_.front());
      work_.pop_front();
    }
    const double late = id_ == 0 ? lateness().main : lateness().side;
    if (late > 0) std::this_thread::sleep_for(std::chrono::duration<double>(late));
    try {
      work();
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> lock(errors().mutex);
      errors().by_device.emplace(device_, error.what());
    }
    work = nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    done_ += 1;
    changed_.notify_all();
  }
}

bool Queue::is_empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == added_;
}
int64_t Queue::added() {
  std::lock_guard<std::mutex> lock(mutex_);
  return added_;
}
bool Queue::has_done(int64_t count) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= count;
}
void Queue::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t until = added_;
  changed_.wait(lock, [&] { return done_ >= until; });
}

void raise_late_error(c10::DeviceIndex device) {
  if (is_gone(device)) raise(device, "", " is gone");
  std::string what;
  {
    std::lock_guard<std::mutex> lock(errors().mutex);
    auto found = errors().by_device.find(device);
    if (found == errors().by_device.end()) return;
    what = found->second;
    errors().by_device.erase(found);
  }
  raise(device, "work that was queued earlier on ", " failed: " + what);
}

void synchronize(c10::DeviceIndex device) {
  for (auto* queue : queues_of(device)) queue->wait();
  raise_late_error(device);
}

void Event::record(c10::DeviceIndex device, c10::StreamId id) {
  auto state = state_;
  int64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    number = ++state->scheduled;
  }
  queue_of(device, id).add([state, number] {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->done = std::max(state->done, number);
    state->seconds = now();
    state->changed.notify_all();
  });
}

void Event::block(c10::DeviceIndex device, c10::StreamId id) {
  auto state = state_;
  int64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    number = state->scheduled;
  }
  queue_of(device, id).add([state, number] {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return state->done >= number; });
  });
}

bool Event::is_done() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->done >= state_->scheduled;
}
void Event::wait() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const int64_t number = state_->scheduled;
  state_->changed.wait(lock, [&] { return state_->done >= number; });
}
double Event::seconds() {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->seconds;
}

Lateness& lateness() {
  static auto* all = new Lateness;
  return *all;
}

c10::Allocator* device_allocator() {
  static auto* all = new DeviceAllocator;
  return all;
}
c10::Allocator* pinned_allocator() {
  static auto* all = new PinnedAllocator;
  return all;
}
bool is_pinned(const void* pointer) {
  return held_pinned(pointer) != nullptr;
}
std::shared_ptr<void> held_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto place = pinned().find(pointer);
  return place == pinned().blocks.end() ? nullptr : place->second.memory;
}
void record_stream(const void* pointer, c10::DeviceIndex, c10::StreamId id) {
  if (pointer) memory().record(pointer, id);
}
Figures figures(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(memory().mutex());
  return memory().figures(device);
}
void reset_peak(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(memory().mutex());
  memory().figures(device).peak = memory().figures(device).allocated;
}
void set_limit(c10::DeviceIndex device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex());
  memory().limit(device) = bytes;
}
int64_t limit(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(memory().mutex());
  return memory().limit(device);
}

Opened::Opened(std::vector<const void*> pointers) : pointers_(std::move(pointers)) {
  for (auto* pointer : pointers_) memory().open(pointer, 1);
}
Opened::~Opened() {
  for (auto* pointer : pointers_) memory().open(pointer, -1);
}

}  // namespace stand_in
