// What cuda.py leaves to the library: the calls of the driver that start a copy between host and
// device (`_Lane`, which gives their addresses), and how much of the device is in use.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace {

using Address = std::uintptr_t;

class CopyCalls {
 public:
  // The first stream has been given `in_turn` bytes in its turn. `ready` and `over` are events of
  // their own.
  CopyCalls(Address copy, Address record, Address hold, Address stream, Address other, Address ready,
            Address over, size_t turn_bytes, size_t in_turn)
      : copy_(reinterpret_cast<Copy>(copy)),
        record_(reinterpret_cast<Record>(record)),
        hold_(reinterpret_cast<Hold>(hold)),
        stream_(reinterpret_cast<void*>(stream)),
        other_(reinterpret_cast<void*>(other)),
        ready_(reinterpret_cast<void*>(ready)),
        over_(reinterpret_cast<void*>(over)),
        turn_bytes_(turn_bytes),
        in_turn_(in_turn) {}

  // `_Lane.start`: the driver's error, or 0.
  int start(const at::Tensor& target, const at::Tensor& source, Address compute, Address done) {
    py::gil_scoped_release released;
    auto* to = static_cast<char*>(target.data_ptr());
    auto* from = static_cast<char*>(source.data_ptr());
    const size_t size_bytes = target.nbytes();
    int failed = record_(ready_, reinterpret_cast<void*>(compute));
    if (!failed) failed = hold_(stream_, ready_, 0);
    for (size_t begin = 0; begin < size_bytes && !failed; begin += turn_bytes_) {
      const size_t part_bytes = std::min(turn_bytes_, size_bytes - begin);
      failed = take_turns(part_bytes);
      if (!failed) failed = copy_(to + begin, from + begin, part_bytes, stream_);
    }
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

  // `_Lane._take_turns`, likewise.
  int take_turns(size_t part_bytes) {
    in_turn_ += part_bytes;
    if (in_turn_ <= turn_bytes_) return 0;
    in_turn_ = part_bytes;
    std::swap(stream_, other_);
    const int failed = record_(over_, other_);
    return failed ? failed : hold_(stream_, over_, 0);
  }

  Copy copy_;
  Record record_;
  Hold hold_;
  void *stream_, *other_, *ready_, *over_;
  size_t turn_bytes_, in_turn_;
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
