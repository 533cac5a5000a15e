// Device "neuron" over host memory: allocator, views, copies, a counting CPU fallback for every other operator, and a
// process group that hands gloo the same memory.
//
// Fresh memory holds 0xFF bytes: NaN for floating types, -1 for integers, so reading what was never written shows.

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::intrusive_ptr;

// One process has one device, whose index is its local rank, as under torch-neuronx.
int environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoi(value) : otherwise;
}
const int device_count = environment("LOCAL_WORLD_SIZE", 1);
const int device_index = device_count > 1 ? environment("LOCAL_RANK", 0) : 0;

c10::Device device() {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_index)};
}

// ---- memory

std::atomic<int64_t> bytes_now{0}, bytes_peak{0};

struct Block {
  void* data;
  int64_t size;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_now -= block->size;
  std::free(block->data);
  delete block;
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{std::malloc(size == 0 ? 1 : size), static_cast<int64_t>(size)};
    TORCH_CHECK(block->data != nullptr, "emulated neuron device: out of memory");
    std::memset(block->data, 0xFF, size);
    const int64_t now = bytes_now += block->size;
    for (int64_t peak = bytes_peak; now > peak && !bytes_peak.compare_exchange_weak(peak, now);) {
    }
    return {block->data, block, &free_block, device()};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

void grow(const c10::Storage& storage, size_t size) {
  auto data = allocator.allocate(size);
  std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

// ---- device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return device();
  }
  c10::Device getDevice() const override {
    return device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, device());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(device_index);
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return getCurrentDevice();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return getCurrentDevice();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::detail::getDefaultCPUGenerator();
    return generator;
  }
  // Checkpointing stages copies in pinned memory; all memory here is as good.
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return at::getCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    grow(storage, size);
  }
};

// ---- operators

// The same memory as a CPU tensor; keeps the device tensor alive.
Tensor host_view(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) {
    return tensor;
  }
  auto* data = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.element_size();
  return at::for_blob(data, tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU))
      .deleter([tensor](void*) {})
      .make_tensor();
}

std::mutex counts_mutex;
std::map<std::string, int64_t> counts;

void count(const std::string& name) {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  ++counts[name];
}

thread_local bool inside_fallback = false;  // whose own copies are no copies the program asked for

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count(c10::toString(op.operator_name()));
  const auto outer = std::exchange(inside_fallback, true);
  const auto restore = c10::make_scope_exit([&] { inside_fallback = outer; });
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

Tensor neuron_empty(
    IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor neuron_empty_strided(
    IntArrayRef sizes,
    IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, keys, c10::dtype_or_default(dtype));
}

Tensor neuron_copy_from(const Tensor& from, const Tensor& to, bool) {
  if (to.is_cpu() && !inside_fallback) {
    count("copy device to host");
  }
  host_view(to).copy_(host_view(from));
  return to;
}

const Tensor& neuron_resize(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto needed = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  if (self.storage().nbytes() < needed) {
    grow(self.storage(), needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor neuron_copy_from_and_resize(const Tensor& from, const Tensor& to) {
  neuron_resize(to, from.sizes(), std::nullopt);
  return neuron_copy_from(from, to, false);
}

Tensor neuron_as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  at::native::setStrided(view, sizes, strides, offset.value_or(self.storage_offset()));
  return view;
}

Tensor neuron_view(const Tensor& self, IntArrayRef sizes) {
  const auto inferred = at::infer_size(sizes, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with the tensor's size and stride");
  return neuron_as_strided(self, inferred, *strides, self.storage_offset());
}

Tensor neuron_reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return neuron_as_strided(self, sizes, strides, self.storage_offset());
}

at::Scalar neuron_local_scalar_dense(const Tensor& self) {
  count("aten::_local_scalar_dense");
  return at::_local_scalar_dense(host_view(self));
}

Tensor& neuron_set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  at::native::setStrided(self, sizes, strides, offset);
  return self;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", neuron_copy_from);
  library.impl("_copy_from_and_resize", neuron_copy_from_and_resize);
  library.impl("_local_scalar_dense", neuron_local_scalar_dense);
  library.impl("_reshape_alias", neuron_reshape_alias);
  library.impl("as_strided", neuron_as_strided);
  library.impl("empty.memory_format", neuron_empty);
  library.impl("empty_strided", neuron_empty_strided);
  library.impl("resize_", neuron_resize);
  library.impl("set_.source_Storage_storage_offset", neuron_set_storage);
  library.impl("view", neuron_view);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

// ---- collectives

using Tensors = std::vector<Tensor>;
using c10d::ReduceOp;

Tensors host_views(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) {
    views.push_back(host_view(tensor));
  }
  return views;
}

std::vector<Tensors> host_views(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const auto& tensors : lists) {
    views.push_back(host_views(tensors));
  }
  return views;
}

// Gloo, on the memory of device tensors, plus the averages and scaled sums that FSDP asks for. Uneven exchanges are
// refused: the sources of torch-neuronx that are public do not have them.
class NeuronBackend final : public c10d::Backend {
 public:
  explicit NeuronBackend(intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "neuron";
  }
  intrusive_ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = host_views(tensors);
    return gloo_->broadcast(views, options);
  }
  intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto views = host_views(tensors);
    auto plain = options;
    auto scale = scaling(plain.reduceOp);
    auto work = gloo_->allreduce(views, plain);
    return scaled(work, views, scale);
  }
  intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto views = host_views(tensors);
    return gloo_->reduce(views, options);
  }
  intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = host_views(outputs);
    auto from = host_views(inputs);
    return gloo_->allgather(to, from, options);
  }
  intrusive_ptr<c10d::Work> all_gather_single(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = host_view(output), from = host_view(input);
    return gloo_->all_gather_single(to, from, options);
  }
  intrusive_ptr<c10d::Work> all_gather_single_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = host_views(outputs), from = host_views(inputs);
    return gloo_->all_gather_single_coalesced(to, from, options);
  }
  intrusive_ptr<c10d::Work> reduce_scatter_single(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = host_view(output), from = host_view(input);
    auto plain = options;
    auto scale = scaling(plain.reduceOp);
    auto work = gloo_->reduce_scatter_single(to, from, plain);
    return scaled(work, {to}, scale);
  }
  intrusive_ptr<c10d::Work> all_to_all_single(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    for (const auto& splits : {output_splits, input_splits}) {
      for (const auto split : splits) {
        TORCH_CHECK_NOT_IMPLEMENTED(split == splits[0], "neuron: all-to-all with uneven splits");
      }
    }
    auto to = host_view(output), from = host_view(input);
    return gloo_->all_to_all_single(to, from, output_splits, input_splits, options);
  }
  intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = host_views(outputs);
    auto from = host_views(inputs);
    return gloo_->gather(to, from, options);
  }
  intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = host_views(outputs);
    auto from = host_views(inputs);
    return gloo_->scatter(to, from, options);
  }
  intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return gloo_->barrier(c10d::BarrierOptions());
  }

 private:
  // Turns an average or a scaled sum into a plain sum; returns what the sum must be multiplied by.
  double scaling(ReduceOp& op) const {
    double factor = 1;
    if (op == ReduceOp::AVG) {
      factor = 1.0 / getSize();
    } else if (op == ReduceOp::PREMUL_SUM) {
      const auto& extra = *static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      factor = extra.tensor_factor.defined() ? extra.tensor_factor.item<double>() : extra.double_factor;
    } else {
      return factor;
    }
    op = ReduceOp::SUM;
    return factor;
  }
  static intrusive_ptr<c10d::Work> scaled(intrusive_ptr<c10d::Work> work, const Tensors& views, double factor) {
    if (factor != 1) {
      work->wait();
      for (const auto& view : views) {
        Tensor(view).mul_(factor);
      }
    }
    return work;
  }

  intrusive_ptr<c10d::Backend> gloo_;
};

intrusive_ptr<c10d::Backend> process_group(const intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<NeuronBackend>(gloo);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.attr("device_count") = device_count;
  module.attr("device_index") = device_index;
  module.def("host_view", &host_view);
  module.def("process_group", &process_group);
  module.def("operator_counts", [] {
    const std::lock_guard<std::mutex> lock(counts_mutex);
    return counts;
  });
  module.def("clear_operator_counts", [] {
    const std::lock_guard<std::mutex> lock(counts_mutex);
    counts.clear();
  });
  module.def("bytes_now", [] { return bytes_now.load(); });
  module.def("bytes_peak", [] { return bytes_peak.load(); });
  module.def("reset_bytes_peak", [] { bytes_peak = bytes_now.load(); });
}
