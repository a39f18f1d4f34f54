// Runs a program of framework operations without Python: one thread and one stream for each
// branch, no interpreter lock. Joined before every serial step.
//
// An operation is called through the dispatcher, so autocast, inference mode and every other
// thread-local state of the caller apply as they do in Python.

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace {

using c10::IValue;

enum class From { Constant, Register, TensorList, OptionalList };

struct Argument {
  From from;
  IValue constant;
  std::vector<int64_t> registers;
};

struct Operation {
  std::optional<c10::OperatorHandle> handle;  // none: element `element` of a tuple or list
  std::vector<Argument> arguments;
  int64_t element = 0;
  int64_t result = 0;
  std::vector<int64_t> last_read;  // registers that nothing reads after this operation
};

struct Unit {
  std::vector<Operation> operations;
  int64_t registers = 0;
  std::vector<int64_t> reads, read_into;    // slot -> register
  std::vector<int64_t> writes, write_from;  // slot <- register
};

// A Python number where the schema wants a tensor is a tensor that does not decide the type.
IValue constant(const py::object& value, const c10::TypePtr& type) {
  const bool number = py::isinstance<py::float_>(value) || py::isinstance<py::int_>(value);
  if (number && type->kind() == c10::TypeKind::TensorType) {
    c10::Scalar scalar = py::isinstance<py::float_>(value)
                             ? c10::Scalar(value.cast<double>())
                             : c10::Scalar(value.cast<int64_t>());
    at::Tensor tensor = c10::scalar_to_tensor(scalar);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }
  return torch::jit::toIValue(value, type);
}

IValue element_of(const IValue& value, int64_t index) {
  if (value.isTuple()) return value.toTupleRef().elements()[index];
  return value.toListRef()[index];
}

void run_unit(const Unit& unit, std::vector<at::Tensor>& slots) {
  std::vector<IValue> registers(unit.registers);
  for (size_t i = 0; i < unit.reads.size(); ++i)
    registers[unit.read_into[i]] = slots[unit.reads[i]];
  std::vector<IValue> stack;
  for (const Operation& operation : unit.operations) {
    if (!operation.handle) {
      registers[operation.result] =
          element_of(registers[operation.arguments[0].registers[0]], operation.element);
    } else {
      stack.clear();
      for (const Argument& argument : operation.arguments) {
        switch (argument.from) {
          case From::Constant: stack.push_back(argument.constant); break;
          case From::Register: stack.push_back(registers[argument.registers[0]]); break;
          case From::TensorList: {
            c10::List<at::Tensor> list;
            for (int64_t r : argument.registers) list.push_back(registers[r].toTensor());
            stack.emplace_back(std::move(list));
            break;
          }
          case From::OptionalList: {
            c10::List<std::optional<at::Tensor>> list;
            for (int64_t r : argument.registers)
              list.push_back(r < 0 ? std::optional<at::Tensor>{} : registers[r].toTensor());
            stack.emplace_back(std::move(list));
            break;
          }
        }
      }
      operation.handle->callBoxed(stack);
      registers[operation.result] =
          stack.size() == 1 ? std::move(stack[0])
                            : IValue(c10::ivalue::Tuple::create(std::move(stack)));
    }
    for (int64_t r : operation.last_read) registers[r] = IValue();
  }
  for (size_t i = 0; i < unit.writes.size(); ++i)
    slots[unit.writes[i]] = registers[unit.write_from[i]].toTensor();
}

// A thread that runs one task at a time.
class Worker {
 public:
  explicit Worker(int intra_op) : thread_([this, intra_op] { loop(intra_op); }) {}
  ~Worker() {
    { std::lock_guard<std::mutex> lock(mutex_); stop_ = true; }
    wake_.notify_all();
    thread_.join();
  }
  void start(std::function<void()> task) {
    { std::lock_guard<std::mutex> lock(mutex_); task_ = std::move(task); error_ = nullptr; }
    wake_.notify_all();
  }
  std::exception_ptr wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return !task_; });
    return error_;
  }

 private:
  void loop(int intra_op) {
    at::set_num_threads(intra_op);
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return stop_ || task_; });
        if (stop_) return;
        task = task_;
      }
      std::exception_ptr error;
      try { task(); } catch (...) { error = std::current_exception(); }
      { std::lock_guard<std::mutex> lock(mutex_); task_ = nullptr; error_ = error; }
      wake_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::function<void()> task_;
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

class Runner {
 public:
  Runner(int64_t slots, c10::Device device) : slots_(slots), device_(device) {}

  void add_step(const std::vector<int64_t>& frees) { steps_.push_back({{}, frees}); }

  void add_unit(std::vector<int64_t> reads, std::vector<int64_t> writes) {
    Unit unit;
    unit.reads = std::move(reads);
    unit.writes = std::move(writes);
    for (size_t i = 0; i < unit.reads.size(); ++i) unit.read_into.push_back(unit.registers++);
    steps_.back().first.push_back(std::move(unit));
  }

  // `arguments`: (kind, registers, value) for the leading arguments; the rest have their defaults.
  int64_t add_operation(const std::string& name, const std::string& overload,
                        const py::dict& by_name) {
    auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    Operation operation;
    for (const c10::Argument& formal : handle.schema().arguments()) {
      Argument argument;
      py::str key(formal.name());
      if (!by_name.contains(key)) {
        TORCH_CHECK(formal.default_value(), name, ": ", formal.name(), " is missing");
        argument = {From::Constant, *formal.default_value(), {}};
      } else {
        auto [kind, registers, value] =
            by_name[key].cast<std::tuple<std::string, std::vector<int64_t>, py::object>>();
        if (kind == "register") argument = {From::Register, IValue(), registers};
        else if (kind == "list") argument = {From::TensorList, IValue(), registers};
        else if (kind == "optional") argument = {From::OptionalList, IValue(), registers};
        else argument = {From::Constant, constant(value, formal.type()), {}};
      }
      operation.arguments.push_back(std::move(argument));
    }
    operation.handle = handle;
    return push(std::move(operation));
  }

  int64_t add_element(int64_t of, int64_t index) {
    Operation operation;
    operation.arguments.push_back({From::Register, IValue(), {of}});
    operation.element = index;
    return push(std::move(operation));
  }

  void end_unit(std::vector<int64_t> write_from) {
    Unit& unit = steps_.back().first.back();
    unit.write_from = std::move(write_from);
    std::vector<int64_t> last(unit.registers, -1);
    for (size_t i = 0; i < unit.operations.size(); ++i)
      for (const Argument& a : unit.operations[i].arguments)
        for (int64_t r : a.registers)
          if (r >= 0) last[r] = static_cast<int64_t>(i);
    for (int64_t r : unit.write_from) last[r] = -1;
    for (int64_t r = 0; r < unit.registers; ++r)
      if (last[r] >= 0) unit.operations[last[r]].last_read.push_back(r);
    widest_ = std::max(widest_, steps_.back().first.size());
  }

  void set_slot(int64_t slot, at::Tensor tensor) { constants_.emplace_back(slot, std::move(tensor)); }

  std::vector<at::Tensor> run(const std::vector<int64_t>& input_slots,
                              const std::vector<at::Tensor>& inputs,
                              const std::vector<int64_t>& output_slots) {
    std::lock_guard<std::mutex> turn(turn_);
    start_workers();
    std::vector<at::Tensor> slots(slots_);
    for (auto& [slot, tensor] : constants_) slots[slot] = tensor;
    for (size_t i = 0; i < inputs.size(); ++i) slots[input_slots[i]] = inputs[i];
    for (auto& [units, frees] : steps_) {
      if (units.size() == 1) run_unit(units[0], slots);
      else if (units.size() > 1) fork(units, slots);
      for (int64_t slot : frees) slots[slot] = at::Tensor();
    }
    std::vector<at::Tensor> outputs;
    for (int64_t slot : output_slots) outputs.push_back(slots[slot]);
    return outputs;
  }

 private:
  int64_t push(Operation operation) {
    Unit& unit = steps_.back().first.back();
    operation.result = unit.registers++;
    unit.operations.push_back(std::move(operation));
    return unit.operations.back().result;
  }

  void start_workers() {
    if (!workers_.empty() || widest_ < 2) return;
    int before = at::get_num_threads();
    int share = std::max<int>(1, before / static_cast<int>(widest_));
    for (size_t i = 1; i < widest_; ++i) workers_.push_back(std::make_unique<Worker>(share));
    for (auto& worker : workers_) { worker->start([] {}); worker->wait(); }
    at::set_num_threads(before);
    if (!device_.is_cpu()) {
      c10::impl::VirtualGuardImpl impl(device_.type());
      for (size_t i = 1; i < widest_; ++i)
        streams_.push_back(impl.getStreamFromGlobalPool(device_, false));
    }
  }

  void fork(const std::vector<Unit>& units, std::vector<at::Tensor>& slots) {
    const bool streams = !device_.is_cpu();
    at::ThreadLocalState state;
    std::optional<c10::Stream> main;
    c10::Event forked(device_.type());
    if (streams) {
      main = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
      forked.record(*main);
    }
    for (size_t i = 1; i < units.size(); ++i)
      workers_[i - 1]->start([&, i] {
        at::ThreadLocalStateGuard as_caller(state);
        if (!streams) return run_unit(units[i], slots);
        c10::StreamGuard guard(streams_[i - 1]);
        forked.block(streams_[i - 1]);
        run_unit(units[i], slots);
        for (int64_t slot : units[i].writes) slots[slot].record_stream(*main);
      });
    std::exception_ptr error;
    try { run_unit(units[0], slots); } catch (...) { error = std::current_exception(); }
    for (size_t i = 1; i < units.size(); ++i) {
      auto other = workers_[i - 1]->wait();
      if (!error) error = other;
      if (streams) {
        c10::Event done(device_.type());
        done.record(streams_[i - 1]);
        done.block(*main);
      }
    }
    if (error) std::rethrow_exception(error);
  }

  size_t slots_, widest_ = 0;
  c10::Device device_;
  std::vector<std::pair<std::vector<Unit>, std::vector<int64_t>>> steps_;
  std::vector<std::pair<int64_t, at::Tensor>> constants_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<c10::Stream> streams_;
  std::mutex turn_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Runner>(module, "Runner")
      .def(py::init([](int64_t slots, const std::string& device) {
        return std::make_unique<Runner>(slots, c10::Device(device));
      }))
      .def("add_step", &Runner::add_step)
      .def("add_unit", &Runner::add_unit)
      .def("add_operation", &Runner::add_operation)
      .def("add_element", &Runner::add_element)
      .def("end_unit", &Runner::end_unit)
      .def("set_slot", &Runner::set_slot)
      .def("run", &Runner::run, py::call_guard<py::gil_scoped_release>());
}
