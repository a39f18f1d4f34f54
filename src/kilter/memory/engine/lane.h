// What cuda.py leaves to the library: the calls of the driver that start a copy between host and
// device (`_Lane`, which gives their addresses), and how much of the device is in use.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <cstdint>

namespace {

using Address = std::uintptr_t;

class CopyCalls {
 public:
  // `ready` is an event of the stream's own.
  CopyCalls(Address copy, Address record, Address hold, Address stream, Address ready)
      : copy_(reinterpret_cast<Copy>(copy)),
        record_(reinterpret_cast<Record>(record)),
        hold_(reinterpret_cast<Hold>(hold)),
        stream_(reinterpret_cast<void*>(stream)),
        ready_(reinterpret_cast<void*>(ready)) {}

  // `_Lane.start`: the driver's error, or 0.
  int start(const at::Tensor& target, const at::Tensor& source, Address compute, Address done) const {
    py::gil_scoped_release released;
    int failed = record_(ready_, reinterpret_cast<void*>(compute));
    if (!failed) failed = hold_(stream_, ready_, 0);
    if (!failed) failed = copy_(target.data_ptr(), source.data_ptr(), target.nbytes(), stream_);
    if (!failed) failed = record_(reinterpret_cast<void*>(done), stream_);
    return failed;
  }

  // `_Lane.hold`, likewise.
  int hold(Address compute, Address done) const {
    return hold_(reinterpret_cast<void*>(compute), reinterpret_cast<void*>(done), 0);
  }

 private:
  using Copy = int (*)(void*, void*, size_t, void*);
  using Record = int (*)(void*, void*);
  using Hold = int (*)(void*, void*, unsigned);
  Copy copy_;
  Record record_;
  Hold hold_;
  void *stream_, *ready_;
};

// `Cuda._allocated_bytes`. In PyTorch 2.8 only the CUDA library itself tells, against which ours is
// not linked.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
void define_allocated_bytes(py::module_& m) {
  m.def("allocated_bytes", torch::wrap_pybind_function([](c10::DeviceIndex device) {
          const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(device);
          const auto& bytes = stats.allocated_bytes[0];  // of all pools
          return std::pair(bytes.current, bytes.peak);
        }));
}
#else
void define_allocated_bytes(py::module_&) {}
#endif

}  // namespace
