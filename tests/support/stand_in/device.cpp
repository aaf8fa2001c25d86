// The stand-in device as torch sees it: guard, hooks, generators, and what Python asks of it.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

namespace stand_in {

void resize_storage(const c10::Storage& storage, size_t bytes);
void bind_process_group(py::module_& m);

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(TYPE, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < DEVICES; ++i) made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return (*all)[index < 0 ? current_device() : index];
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(TYPE, current_device());
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto index = device.has_index() ? device.index() : current_device();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, index), new_stream(index));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), exchange_stream(stream.device_index(), stream.id()));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Event*>(event)->block(stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->is_done(); }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->wait();
    raise_late_error(current_device());
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(second);
    a->wait();
    b->wait();
    return (b->seconds() - a->seconds()) * 1e3;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream.device_index(), stream.id()).is_empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream.device_index(), stream.id()).wait();
    raise_late_error(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize(index); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer.get(), stream.device_index(), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device() : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, current_device()}; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

PyObject* listener = nullptr;  // never freed: threads may still speak when a process ends

}  // namespace

void host_reads(const std::string& what) {
  if (!listener) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(listener)(what);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(TYPE, device_allocator());
  bind_process_group(m);
  m.def("set_device", &set_current_device);
  m.def("current_device", &current_device);
  m.def("synchronize", [](int index) { synchronize(static_cast<c10::DeviceIndex>(index)); }, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("figures", [](int index) {
    const auto found = figures(static_cast<c10::DeviceIndex>(index));
    return std::make_tuple(found.allocated, found.peak, found.allocations);
  });
  m.def("reset_peak", [](int index) { reset_peak(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_limit", [](int index, int64_t bytes) { set_limit(static_cast<c10::DeviceIndex>(index), bytes); });
  m.def("limit", [](int index) { return limit(static_cast<c10::DeviceIndex>(index)); });
  m.def("lose", [](int index) { lose(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_lateness", [](double main, double side) {
    lateness().main = main;
    lateness().side = side;
  });
  m.def("on_host_read", [](const py::object& called) {
    Py_XDECREF(listener);
    listener = called.is_none() ? nullptr : called.inc_ref().ptr();
  });
}

}  // namespace stand_in
