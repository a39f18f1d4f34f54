// Launches the kernel of fused.py without Python, as soon as Triton has compiled it.

#pragma once

#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <optional>

#include "lane.h"
#include "saved_tensors.h"

namespace {

class NormKernel {
 public:
  // The driver's way to launch, the kernel, and how it is launched. `stream` gives the present
  // stream of a device.
  NormKernel(Address launch, Address function, unsigned threads, unsigned shared_bytes,
             py::object stream)
      : launch_(reinterpret_cast<Launch>(launch)),
        function_(reinterpret_cast<void*>(function)),
        threads_(threads),
        shared_bytes_(shared_bytes),
        stream_(std::move(stream)) {}

  // The driver's error, or 0.
  int launch(unsigned rows, const std::array<Address, 6>& addresses, std::uint64_t width,
             int device) const {
    const auto stream = stream_(device).cast<Address>();
    Address scratch = 0;  // some versions of Triton pass it; the kernel needs none
    std::array<const void*, 9> all{};
    for (size_t i = 0; i < addresses.size(); i++) all[i] = &addresses[i];
    all[6] = &width;
    all[7] = all[8] = &scratch;  // the driver reads as many as the kernel has
    const py::gil_scoped_release released;
    return launch_(function_, rows, 1, 1, threads_, 1, 1, shared_bytes_,
                   reinterpret_cast<void*>(stream), all.data(), nullptr);
  }

 private:
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         void*, const void**, void**);
  Launch launch_;
  void* function_;
  unsigned threads_, shared_bytes_;
  py::object stream_;
};

constexpr Address kAligned = 16;  // as `ALIGNED` of fused.py

// `fused.layer_norm` by one of these `kernels`: a tensor, its statistics, weight and bias, or
// neither of these. Nothing: left to Python.
std::optional<Tensor> normalised(PyObject* kernels, const std::array<const Tensor*, 5>& given,
                                 PyObject* dtype) {
  const Tensor& x = *given[0];
  const bool affine = given[3] != nullptr;
  if (affine != (given[4] != nullptr)) return {};
  if (!x.is_cuda() || x.scalar_type() != at::kFloat || !x.is_contiguous() || x.numel() == 0) return {};
  for (const Tensor* parameter : {given[3], given[4]})
    if (parameter != nullptr && parameter->scalar_type() != at::kFloat) return {};
  const auto device = x.device();
  if (c10::impl::VirtualGuardImpl(device.type()).getDevice() != device) return {};
  const auto width = x.sizes().back();
  const auto key = py::make_tuple(device.index(), py::handle(dtype), width, affine);
  PyObject* kernel = PyDict_GetItemWithError(kernels, key.ptr());
  if (kernel == nullptr) return {};
  const auto type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  auto out = at::empty_like(x, x.options().dtype(type));
  std::array<Address, 6> addresses{reinterpret_cast<Address>(out.data_ptr())};
  for (size_t i = 0; i < given.size(); i++) {
    const Tensor& one = given[i] == nullptr ? x : *given[i];  // what is not there is not read
    addresses[i + 1] = reinterpret_cast<Address>(one.data_ptr());
  }
  for (const Address address : addresses)
    if (address % kAligned) return {};
  const int failed = py::handle(kernel).cast<const NormKernel&>().launch(
      static_cast<unsigned>(x.numel() / width), addresses, static_cast<std::uint64_t>(width),
      device.index());
  if (failed) return {};
  return out;
}

}  // namespace
