// Collectives over tensors of the stand-in device: gloo's over the same memory, in a stream of their own, after what the
// current stream has been given so far. Who asks for a result lets the current stream wait for it, and not the host.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace stand_in {

at::Tensor on_cpu(const at::Tensor& tensor);  // the same memory

namespace {

using Tensors = std::vector<at::Tensor>;

class Sent final : public c10d::Work {
 public:
  Sent(int rank, c10d::OpType type, Tensors kept, c10::DeviceIndex device, c10::StreamId stream)
      : Work(rank, type), kept_(std::move(kept)), device_(device) {
    done_.record(device, stream);
    const c10::Device here(c10::DeviceType::PrivateUse1, device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{here});
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, here, stream));
    future_->markCompleted(at::IValue(kept_));
  }
  bool isCompleted() override { return done_.is_done(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    done_.block(device_, current_stream(device_));
    kept_.clear();  // what comes after is ordered after it
  }
  std::vector<at::Tensor> result() override { return kept_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors kept_;
  c10::DeviceIndex device_;
  Event done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "standin"; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return send_on(c10d::OpType::BROADCAST, tensors, [=, this](Tensors& all) { return gloo_->broadcast(all, options); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return send_on(c10d::OpType::ALLREDUCE, tensors, [=, this](Tensors& all) { return gloo_->allreduce(all, options); });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return send_on(c10d::OpType::ALLREDUCE_COALESCED, tensors, [=, this](Tensors& all) {
      return gloo_->allreduce_coalesced(all, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return send_on(c10d::OpType::REDUCE, tensors, [=, this](Tensors& all) { return gloo_->reduce(all, options); });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto all = outputs.at(0);
    all.push_back(inputs.at(0));
    return send_on(c10d::OpType::ALLGATHER, all, [=, this](Tensors& both) {
      std::vector<Tensors> there{Tensors(both.begin(), both.end() - 1)};
      Tensors here{both.back()};
      return gloo_->allgather(there, here, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors all{output, input};
    return send_on(c10d::OpType::_ALLGATHER_BASE, all, [=, this](Tensors& both) {
      return gloo_->_allgather_base(both[0], both[1], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return send_pairs(c10d::OpType::COALESCED, outputs, inputs, [=, this](at::Tensor& output, at::Tensor& input) {
      return gloo_->_allgather_base(output, input, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors all{output, input};
    return send_on(c10d::OpType::_REDUCE_SCATTER_BASE, all, [=, this](Tensors& both) {
      return gloo_->_reduce_scatter_base(both[0], both[1], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return send_pairs(c10d::OpType::COALESCED, outputs, inputs, [=, this](at::Tensor& output, at::Tensor& input) {
      return gloo_->_reduce_scatter_base(output, input, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
      const c10d::AllToAllOptions& options) override {
    Tensors all{output, input};
    return send_on(c10d::OpType::ALLTOALL_BASE, all, [=, this](Tensors& both) {
      auto to_them = to, from_us = from;
      return gloo_->alltoall_base(both[0], both[1], to_them, from_us, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto all = outputs;
    all.insert(all.end(), inputs.begin(), inputs.end());
    return send_on(c10d::OpType::ALLTOALL, all, [=, this](Tensors& both) {
      Tensors there(both.begin(), both.begin() + both.size() / 2), here(both.begin() + both.size() / 2, both.end());
      return gloo_->alltoall(there, here, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return send_on(
        c10d::OpType::SEND, tensors, [=, this](Tensors& all) { return gloo_->send(all, to, tag); }, 2 * to + 1);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return send_on(
        c10d::OpType::RECV, tensors, [=, this](Tensors& all) { return gloo_->recv(all, from, tag); }, 2 * from + 2);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    Tensors one{at::zeros({1}, at::TensorOptions(c10::Device(c10::DeviceType::PrivateUse1, current_device())))};
    auto work = send_on(c10d::OpType::BARRIER, one, [this](Tensors& all) { return gloo_->allreduce(all); });
    work->wait();
    current_queue(current_device()).wait();
    return work;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

 private:
  using Collective = std::function<c10::intrusive_ptr<c10d::Work>(Tensors&)>;

  // Lanes: all collectives are in one order; what goes to a peer, or comes from it, is in an order of its own.
  c10::intrusive_ptr<c10d::Work> send_on(c10d::OpType type, const Tensors& tensors, Collective collective, int lane = 0) {
    const auto device = tensors.at(0).device().index();
    auto& stream = lanes_[{device, lane}];
    if (!stream) stream = new_stream(device);
    Event ready;
    ready.record(device, current_stream(device));
    ready.block(device, stream);
    Tensors aliases;
    std::vector<const void*> touched;
    for (const auto& tensor : tensors) {
      aliases.push_back(on_cpu(tensor));
      if (auto* base = tensor.storage().data_ptr().get()) touched.push_back(base);
    }
    queue_of(device, stream).add([aliases, touched, collective]() mutable {
      Opened opened(touched);
      collective(aliases)->wait();
    });
    return c10::make_intrusive<Sent>(rank_, type, tensors, device, stream);
  }

  c10::intrusive_ptr<c10d::Work> send_pairs(
      c10d::OpType type, Tensors& outputs, Tensors& inputs,
      std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor&, at::Tensor&)> collective) {
    auto all = outputs;
    all.insert(all.end(), inputs.begin(), inputs.end());
    return send_on(type, all, [collective](Tensors& both) {
      const size_t half = both.size() / 2;
      for (size_t i = 0; i + 1 < half; ++i) collective(both[i], both[half + i])->wait();
      return collective(both[half - 1], both[both.size() - 1]);
    });
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::StreamId> lanes_;
};

}  // namespace

void bind_process_group(py::module_& m) {
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(m, "Group").def(
      py::init<c10::intrusive_ptr<c10d::Backend>>());
}

}  // namespace stand_in
