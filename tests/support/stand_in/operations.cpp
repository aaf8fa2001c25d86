// What torch asks of a device: operations, copies, views, random numbers. The values are those of the CPU's kernels, which
// streams run later over the same memory; shapes are torch's own for tensors without values.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace stand_in {

namespace {

using at::Tensor;
using c10::IValue;

constexpr auto KEY = c10::DispatchKey::PrivateUse1;

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1; }

// A tensor of the device as work has to know it: without a reference, because memory belongs to a stream's order.
struct Alias {
  void* base;
  size_t bytes;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  caffe2::TypeMeta type;
  bool conj, neg;

  explicit Alias(const Tensor& tensor)
      : base(tensor.storage().mutable_data_ptr().get()),
        bytes(tensor.storage().nbytes()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        offset(tensor.storage_offset()),
        type(tensor.dtype()),
        conj(tensor.is_conj()),
        neg(tensor.is_neg()) {}

  // The same memory as a tensor of the CPU.
  Tensor on_cpu() const {
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(base, c10::Device(c10::DeviceType::CPU)), nullptr, false);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    if (conj) tensor._set_conj(true);
    if (neg) tensor._set_neg(true);
    return tensor;
  }
};

// Around calls of torch's operations in the place of one of ours: no second graph, no second look of Python.
struct Below {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

Tensor empty_here(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType type, c10::DeviceIndex index) {
  const auto before = current_device();
  set_current_device(index);
  auto made = at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(KEY), type);
  set_current_device(before);
  return made;
}

Tensor without_values(const Tensor& tensor) {
  if (!is_ours(tensor) && tensor.dim() == 0) return tensor;  // a number, which stays on the CPU
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// An argument, as work has to know it.
using Packed = std::function<IValue()>;

struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  c10::DeviceIndex device = -1;
  std::vector<const void*> touched;
  std::vector<Packed> packed;

  void note(const Tensor& tensor) {
    if (!is_ours(tensor)) return;
    TORCH_CHECK(
        device < 0 || device == tensor.device().index(), op.schema().name(), ": tensors are on standin:",
        static_cast<int>(device), " and on standin:", static_cast<int>(tensor.device().index()));
    device = tensor.device().index();
  }

  bool takes_host_tensors() const {
    const auto& name = op.schema().name();
    return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  }

  IValue pack(const Tensor& tensor, std::vector<Packed>& into) {
    if (!tensor.defined()) return tensor;
    if (is_ours(tensor)) {
      Alias alias(tensor);
      if (alias.base) touched.push_back(alias.base);
      into.emplace_back([alias] { return IValue(alias.on_cpu()); });
      return tensor;
    }
    TORCH_CHECK(
        tensor.dim() == 0 || takes_host_tensors() || tensor.numel() == 0, op.schema().name(),
        ": expected all tensors on the device, but one is on ", tensor.device());
    auto copy = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    into.emplace_back([copy] { return IValue(copy); });
    return tensor;
  }
};

bool draws(const c10::OperatorHandle& op) { return op.hasTag(at::Tag::nondeterministic_seeded); }

bool depends_on_values(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const auto& name = op.schema().name();
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") {
    for (const auto& argument : arguments)
      if (argument.isList())
        for (const auto& entry : argument.toListRef())
          if (entry.isTensor() && entry.toTensor().defined() &&
              (entry.toTensor().scalar_type() == at::kBool || entry.toTensor().scalar_type() == at::kByte))
            return true;
    return false;
  }
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
}

template <typename Change>
IValue changed(const IValue& value, const c10::TypePtr& type, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(change(tensor).toTensor());
    return made;
  }
  if (value.isList()) {
    auto list = value.toList();
    if (list.elementType()->isSubtypeOf(*c10::OptionalType::ofTensor()) &&
        list.elementType()->kind() != c10::TypeKind::TensorType) {
      c10::List<std::optional<Tensor>> made;
      for (const IValue entry : list) {
        if (entry.isTensor()) made.push_back(change(entry.toTensor()).toTensor());
        else made.push_back(std::nullopt);
      }
      return made;
    }
  }
  return value;
}

// Runs an operation of the CPU over what the arguments stand for.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack& stack, const std::optional<uint64_t>& seed) {
  Below below;
  if (seed) {
    for (auto& value : stack)
      if (value.isGenerator()) value = at::detail::createCPUGenerator(*seed);
  }
  op.callBoxed(stack);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Call call{op, std::vector<IValue>(stack->end() - count, stack->end())};
  stack->resize(stack->size() - count);

  for (const auto& argument : call.arguments) {
    if (argument.isTensor()) call.note(argument.toTensor());
    else if (argument.isTensorList()) for (const Tensor& tensor : argument.toTensorVector()) call.note(tensor);
    else if (argument.isList())
      for (const IValue entry : argument.toList()) if (entry.isTensor()) call.note(entry.toTensor());
  }
  if (call.device < 0) call.device = current_device();

  // Random numbers: one seed of the device's generator now, the numbers later.
  std::optional<uint64_t> seed;
  if (draws(op)) {
    at::Generator generator = at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::PrivateUse1, call.device));
    for (size_t i = 0; i < count; ++i)
      if (call.arguments[i].isGenerator()) generator = call.arguments[i].toGenerator();
    auto* own = generator.get<at::CPUGeneratorImpl>();
    std::lock_guard<std::mutex> lock(own->mutex_);
    seed = own->random64();
    for (size_t i = 0; i < count; ++i) {
      if (schema.arguments()[i].type()->str() == "Generator?") call.arguments[i] = at::detail::createCPUGenerator(*seed);
    }
  }

  bool by_values = depends_on_values(op, call.arguments);
  for (const auto& returned : schema.returns()) {
    const auto kind = returned.type()->kind();
    by_values = by_values || (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType);
    TORCH_CHECK(
        !returned.alias_info() || returned.alias_info()->isWrite(), "the stand-in device does not know the view ",
        schema.name(), ".", schema.overload_name());
  }

  // The shapes of what comes out.
  torch::jit::Stack shapes;
  bool known = !by_values;
  if (known) {
    for (size_t i = 0; i < count; ++i) {
      auto value = changed(call.arguments[i], schema.arguments()[i].type(), [](const Tensor& tensor) {
        return IValue(tensor.defined() ? without_values(tensor) : tensor);
      });
      if (value.isDevice()) value = c10::Device(c10::DeviceType::Meta);
      if (value.isGenerator()) value = IValue();
      shapes.push_back(value);
    }
    auto inputs = shapes;
    try {
      Below below;
      op.callBoxed(shapes);
    } catch (const c10::NotImplementedError&) {
      known = false;
    }
    if (known) {  // out= may have grown
      for (size_t i = 0; i < count; ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && alias->isWrite() && call.arguments[i].isTensor() && is_ours(call.arguments[i].toTensor()) &&
            inputs[i].toTensor().sizes() != call.arguments[i].toTensor().sizes())
          call.arguments[i].toTensor().resize_(inputs[i].toTensor().sizes());
      }
    }
  }

  auto written = [&](size_t number) -> std::optional<IValue> {
    const auto* alias = schema.returns()[number].alias_info();
    if (!alias) return std::nullopt;
    for (size_t i = 0; i < count; ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) return call.arguments[i];
    }
    return std::nullopt;
  };
  bool only_writes = true;
  for (size_t i = 0; i < schema.returns().size(); ++i) only_writes = only_writes && written(i).has_value();

  std::vector<std::function<IValue()>> later;
  for (size_t i = 0; i < count; ++i) {
    auto packs = std::make_shared<std::vector<Packed>>();
    changed(call.arguments[i], schema.arguments()[i].type(), [&](const Tensor& tensor) {
      return call.pack(tensor, *packs);
    });
    auto value = call.arguments[i];
    if (value.isDevice()) value = c10::Device(c10::DeviceType::CPU);
    if (value.isTensor() || value.isList()) {
      auto type = schema.arguments()[i].type();
      // Only what is undefined or no tensor at all may be kept as it is: a reference would keep memory alive.
      IValue skeleton = changed(value, type, [](const Tensor& tensor) {
        return IValue(tensor.defined() ? at::empty({0}) : tensor);
      });
      later.emplace_back([skeleton, type, packs] {
        size_t next = 0;
        return changed(skeleton, type, [&](const Tensor& tensor) {
          return tensor.defined() ? (*packs)[next++]() : IValue(tensor);
        });
      });
    } else {
      later.emplace_back([value] { return value; });
    }
  }
  auto arguments_later = [later] {
    torch::jit::Stack values;
    for (const auto& one : later) values.push_back(one());
    return values;
  };

  if (!known && !only_writes) {  // computed at once, and waited for
    if (by_values) host_reads(schema.name());
    current_queue(call.device).wait();
    raise_late_error(call.device);
    torch::jit::Stack values;
    {
      Opened opened(call.touched);
      values = arguments_later();
      run_on_cpu(op, values, seed);
      for (size_t i = 0; i < values.size(); ++i) {
        if (auto same = written(i)) {
          values[i] = *same;
        } else {
          values[i] = changed(values[i], schema.returns()[i].type(), [&](const Tensor& tensor) {
            if (!tensor.defined()) return IValue(tensor);
            auto made = empty_here(tensor.sizes(), tensor.strides(), tensor.scalar_type(), call.device);
            current_queue(call.device).wait();  // what fills new memory
            if (made.numel()) {
              Opened own({made.storage().data_ptr().get()});
              Alias(made).on_cpu().copy_(tensor);
            }
            return IValue(made);
          });
        }
      }
    }
    stack->insert(stack->end(), values.begin(), values.end());
    return;
  }

  std::vector<std::optional<Alias>> made;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (auto same = written(i)) {
      stack->push_back(*same);
      continue;
    }
    stack->push_back(changed(shapes[i], schema.returns()[i].type(), [&](const Tensor& tensor) {
      if (!tensor.defined()) {
        made.push_back(std::nullopt);
        return IValue(tensor);
      }
      auto here = empty_here(tensor.sizes(), tensor.strides(), tensor.scalar_type(), call.device);
      made.emplace_back(Alias(here));
      if (here.numel()) call.touched.push_back(here.storage().data_ptr().get());
      return IValue(here);
    }));
  }
  std::vector<bool> is_new;
  for (size_t i = 0; i < schema.returns().size(); ++i) is_new.push_back(!written(i).has_value());
  current_queue(call.device).add([op, arguments_later, made, is_new, seed, touched = call.touched, only_writes] {
    Opened opened(touched);
    c10::InferenceMode no_graph(false);
    at::NoGradGuard no_grad;
    auto values = arguments_later();
    run_on_cpu(op, values, seed);
    size_t next = 0;
    for (size_t i = 0; i < is_new.size(); ++i) {
      if (!is_new[i]) continue;
      Below below;
      auto put = [&](const Tensor& tensor) {
        const auto& target = made[next++];
        if (target && tensor.defined() && tensor.numel()) target->on_cpu().copy_(tensor);
      };
      if (values[i].isTensor()) put(values[i].toTensor());
      else for (const Tensor& tensor : values[i].toTensorVector()) put(tensor);
    }
  });
}

// Memory and views.

Tensor empty_memory_format(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto index = device && device->has_index() ? device->index() : current_device();
  const auto before = current_device();
  set_current_device(index);
  auto made = at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), device_allocator(), c10::DispatchKeySet(KEY), c10::dtype_or_default(type), format);
  set_current_device(before);
  return made;
}

Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const auto index = device && device->has_index() ? device->index() : current_device();
  return empty_here(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(type), index);
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes)); }

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const auto index = impl->device().index();
  const auto before = current_device();
  set_current_device(index);
  auto fresh = device_allocator()->allocate(bytes);
  set_current_device(before);
  const auto kept = std::min(bytes, impl->nbytes());
  if (kept) {
    void *from = impl->mutable_data(), *to = fresh.get();
    current_queue(index).add([from, to, kept] {
      Opened opened({from, to});
      std::memcpy(to, from, kept);
    });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* impl = self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(wanted, self.dtype().itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage(), bytes);
  impl->set_sizes_contiguous(wanted);
  return self;
}

Tensor& set_storage(
    Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  if (strides.empty() && !shape.empty()) {
    impl->set_sizes_contiguous(shape);
    impl->set_storage_offset(offset.expect_int());
  } else {
    impl->set_sizes_and_strides(shape, C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({length});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

Tensor& set_nothing(Tensor& self) {
  auto fresh = empty_here({0}, {1}, self.scalar_type(), self.device().index());
  return set_tensor(self, fresh);
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() && self.strides() == other.strides();
}

void record_tensor(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr().get(), stream.device_index(), stream.id());
}

// Copies.

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const bool from_here = is_ours(self), to_here = is_ours(to);
  if (from_here && to_here) {
    const auto source = self.device().index(), target = to.device().index();
    Alias a(self), b(to);
    auto work = [a, b] {
      Opened opened({a.base, b.base});
      Below below;
      b.on_cpu().copy_(a.on_cpu());
    };
    if (source == target) {
      current_queue(target).add(work);
    } else {  // a copy between devices is in the order of the current streams of both
      Event before, after;
      before.record(target, current_stream(target));
      before.block(source, current_stream(source));
      current_queue(source).add(work);
      after.record(source, current_stream(source));
      after.block(target, current_stream(target));
    }
    return to;
  }
  if (to_here) {
    Alias b(to);
    auto& queue = current_queue(to.device().index());
    if (non_blocking && is_pinned(self.storage().data_ptr().get())) {  // read when the copy is made, and not before
      Alias a(self);
      queue.add([a, b, held = held_pinned(self.storage().data_ptr().get())] {
        Opened opened({b.base});
        Below below;
        b.on_cpu().copy_(a.on_cpu());
      });
    } else {
      auto staged = self.detach().clone();
      queue.add([staged, b] {
        Opened opened({b.base});
        Below below;
        b.on_cpu().copy_(staged);
      });
      if (!non_blocking) queue.wait();
    }
    return to;
  }
  Alias a(self);
  auto& queue = current_queue(self.device().index());
  if (non_blocking && is_pinned(to.storage().data_ptr().get())) {
    Alias b(to);
    queue.add([a, b, held = held_pinned(to.storage().data_ptr().get())] {
      Opened opened({a.base});
      Below below;
      b.on_cpu().copy_(a.on_cpu());
    });
    return to;
  }
  host_reads("copy to the host");
  queue.wait();
  raise_late_error(self.device().index());
  Opened opened({a.base});
  Below below;
  Tensor(to).copy_(a.on_cpu());
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

c10::Scalar local_scalar(const Tensor& self) {
  host_reads("item()");
  const auto index = self.device().index();
  current_queue(index).wait();
  raise_late_error(index);
  Alias a(self);
  Opened opened({a.base});
  Below below;
  return a.on_cpu().item();
}

// Dropout has no generator among its arguments, and no CPU's kernel that would take a seed.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("native_dropout", native_dropout);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
#define NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(NARROW)
  AT_FORALL_FP32(WIDE)
  AT_FORALL_PROMOTE(PROMOTE)
}

at::Tensor on_cpu(const at::Tensor& tensor) { return Alias(tensor).on_cpu(); }

void resize_storage(const c10::Storage& storage, size_t bytes) { resize_bytes(storage, bytes); }

}  // namespace stand_in
