// Records the operations that run in the call of a module, and runs them again: what recording.py
// does, without Python for each operation. What holds for an operation is asked of Python once.
// Built with it are the headers beside it.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "lane.h"
#include "norm_kernel.h"
#include "operator_calls.h"
#include "position.h"
#include "resolved.h"
#include "saved_tensors.h"
#include "small_copies.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

struct Foreign : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Rules {
  std::string name, ends;
  PyObject* text;  // the name; never freed
  bool looks, refused, unordered, random, memory, fills, puts, norm, scans;
  std::vector<size_t> writes;
};

// A tensor among the arguments: a storage, and the tensor's layout. No storage: -1.
struct Ref {
  int64_t storage = -1;
  at::ScalarType dtype = at::kByte;
  at::DimVector size, stride;
  int64_t offset = 0;

  Ref() = default;
  Ref(int64_t number, const Tensor& tensor)
      : storage(number),
        dtype(tensor.scalar_type()),
        size(tensor.sizes()),
        stride(tensor.strides()),
        offset(tensor.storage_offset()) {}

  Tensor on(const Tensor& base) const {
    if (base.scalar_type() != dtype)
      return at::empty({0}, base.options().dtype(dtype)).set_(base.storage(), offset, size, stride);
    if (base.sizes() == size && base.strides() == stride && base.storage_offset() == offset)
      return base;
    return at::as_strided(base, size, stride, offset);
  }
};

// `UnsetMemory` of unset_memory.py.
class UnsetMemory {
 public:
  explicit UnsetMemory(int64_t size_bytes) : size_bytes_(size_bytes) {}

  bool set(const Ref& view) {
    const int64_t each = static_cast<int64_t>(c10::elementSize(view.dtype));
    std::vector<std::pair<int64_t, int64_t>> dimensions;
    for (size_t i = 0; i < view.size.size(); i++)
      if (view.size[i] != 1) dimensions.emplace_back(each * view.stride[i], view.size[i]);
    std::sort(dimensions.begin(), dimensions.end());
    int64_t width = each, rows = 1, row = size_bytes_;
    for (const auto& [step, count] : dimensions) {
      if (rows == 1 && step == width) {
        width *= count;
      } else if (rows == 1) {
        rows = count;
        row = step;
      } else if (step == rows * row) {
        rows *= count;
      } else {
        return false;
      }
    }
    if (rows * row != size_bytes_ || (row_bytes_ != 0 && row_bytes_ != row)) return false;
    row_bytes_ = row;
    columns_.emplace_back(each * view.offset, each * view.offset + width);
    std::sort(columns_.begin(), columns_.end());
    int64_t reached = 0;
    for (const auto& [first, last] : columns_) {
      if (first > reached) return false;
      reached = std::max(reached, last);
    }
    return reached == row;
  }

 private:
  int64_t size_bytes_, row_bytes_ = 0;
  std::vector<std::pair<int64_t, int64_t>> columns_;
};

enum class Kind { Constant, One, List, OptionalList };

struct Argument {
  Kind kind = Kind::Constant;
  IValue constant;
  std::vector<Ref> refs;
};

using Bases = std::unordered_map<int64_t, Tensor>;

struct Step {
  c10::OperatorHandle operation;
  const Rules* rules;
  std::vector<Argument> arguments;
  std::vector<int64_t> reads, writes;
  std::vector<std::pair<size_t, int64_t>> makes;  // place of a result, storage that it brought
  std::optional<at::Generator> generator;         // the one that it draws from
  Tensor state;                                   // of the generator, before
  bool refused = false;

  void again(Bases& bases) const;
};

void leaves(const IValue& value, std::vector<Tensor>& found) {
  if (value.isTensor()) {
    found.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& one : value.toTensorVector()) found.push_back(one);
  } else if (value.isTuple() || value.isList()) {
    const auto items = value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    for (const IValue& one : items) leaves(one, found);
  } else {
    found.emplace_back();
  }
}

IValue put(const Argument& argument, const Bases& bases) {
  const auto tensor = [&](const Ref& ref) { return ref.on(bases.at(ref.storage)); };
  if (argument.kind == Kind::Constant) return argument.constant;
  if (argument.kind == Kind::One) return tensor(argument.refs[0]);
  if (argument.kind == Kind::List) {
    c10::List<Tensor> list;
    for (const Ref& ref : argument.refs) list.push_back(tensor(ref));
    return list;
  }
  c10::List<std::optional<Tensor>> list;
  for (const Ref& ref : argument.refs)
    list.push_back(ref.storage < 0 ? std::nullopt : std::optional<Tensor>(tensor(ref)));
  return list;
}

Tensor state_of(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// Puts back the state of a generator.
struct Drawn {
  at::Generator generator;
  Tensor state;
  explicit Drawn(at::Generator of) : generator(std::move(of)), state(state_of(generator)) {}
  ~Drawn() { set_state(generator, state); }
};

void Step::again(Bases& bases) const {
  Stack stack;
  stack.reserve(arguments.size());
  for (const Argument& argument : arguments) stack.push_back(put(argument, bases));
  if (generator) {
    Drawn drawn(*generator);
    set_state(drawn.generator, state);
    operation.callBoxed(&stack);
  } else {
    operation.callBoxed(&stack);
  }
  if (makes.empty()) return;
  std::vector<Tensor> results;
  for (const IValue& value : stack) leaves(value, results);
  for (const auto& [place, storage] : makes) bases[storage] = results.at(place);
}

// Steps that make some storages.
struct Rerun {
  std::vector<std::shared_ptr<const Step>> steps;
  std::vector<int64_t> wanted;
  std::vector<Ref> layouts;  // of what is wanted; empty: as it was made
  std::vector<std::vector<int64_t>> frees;  // storages that no later step reads

  void finish() {
    std::unordered_set<int64_t> known(wanted.begin(), wanted.end());
    frees.resize(steps.size());
    for (size_t i = steps.size(); i-- > 0;) {
      for (const int64_t number : steps[i]->reads)
        if (known.insert(number).second) frees[i].push_back(number);
      for (const auto& [_, number] : steps[i]->makes)
        if (known.insert(number).second) frees[i].push_back(number);
    }
  }

  std::vector<Tensor> run(Bases bases) const {
    for (size_t i = 0; i < steps.size(); i++) {
      steps[i]->again(bases);
      for (const int64_t number : frees[i]) bases.erase(number);
    }
    std::vector<Tensor> made;
    for (size_t i = 0; i < wanted.size(); i++) {
      const Tensor& base = bases.at(wanted[i]);
      made.push_back(layouts.empty() ? base : layouts[i].on(base));
    }
    return made;
  }

  py::tuple operations() const {
    py::tuple found(steps.size());
    for (size_t i = 0; i < steps.size(); i++) found[i] = py::handle(steps[i]->rules->text);
    return found;
  }
};

// What an operation reads and writes, before it runs.
struct Pending {
  std::shared_ptr<Step> step;
  bool noted = false;
};

// A storage, the tensor that was met before the recording made it, and the version of that.
using Given = std::tuple<int64_t, std::optional<Tensor>, int64_t>;

// Holds a mutex. Under it a tensor may be referenced, for which the interpreter's lock is taken, so
// nobody waits for the mutex with the interpreter's lock.
class Locked {
 public:
  explicit Locked(std::mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    if (PyGILState_Check()) {
      py::gil_scoped_release released;
      mutex_.lock();
    } else {
      mutex_.lock();
    }
  }
  ~Locked() { mutex_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  std::mutex& mutex_;
};

class Recorder {
 public:
  void end(const std::string& why) {
    const Locked lock(mutex_);
    end_locked(why);
  }

  int64_t position() {
    const Locked lock(mutex_);
    return static_cast<int64_t>(steps_.size());
  }

  std::vector<int64_t> numbers_of(const std::vector<Tensor>& tensors) {
    const Locked lock(mutex_);
    std::vector<int64_t> numbers;
    for (const Tensor& one : tensors) {
      const auto found =
          one.has_storage() ? numbers_.find(one.storage().unsafeGetStorageImpl()) : numbers_.end();
      numbers.push_back(found == numbers_.end() ? -1 : found->second);
    }
    return numbers;
  }

  // `CallRecorder.kept_since`.
  py::dict kept_since(const py::list& kept, size_t begin) {
    const Locked lock(mutex_);
    py::dict found;
    for (size_t i = begin; i < kept.size(); i++) {
      PyObject* one = PyList_GET_ITEM(kept.ptr(), static_cast<Py_ssize_t>(i));
      PyObject* object = PyTuple_GET_ITEM(one, 0);
      if (!of_class(object, names.tensor) && !of_class(object, names.parameter)) continue;
      const Tensor& tensor = THPVariable_Unpack(object);
      if (!tensor.has_storage()) continue;
      const auto number = numbers_.find(tensor.storage().unsafeGetStorageImpl());
      if (number != numbers_.end()) found[py::int_(number->second)] = py::handle(one);
    }
    return found;
  }

  int64_t made_at(int64_t number) {
    const Locked lock(mutex_);
    return made_at_.at(number);
  }

  void before(const c10::OperatorHandle& operation, const Rules& rules, const Stack& stack,
              Pending& pending) {
    const Locked lock(mutex_);
    if (!rules.ends.empty()) end_locked(rules.ends);
    if (!ended_.empty()) return;
    try {
      pending.step = arguments(operation, rules, stack);
      pending.noted = true;
    } catch (const std::exception& error) {
      end_locked(error.what());
    }
  }

  void after(const Rules& rules, const Stack& stack, Pending& pending) {
    const Locked lock(mutex_);
    if (!pending.noted || !ended_.empty()) return;
    try {
      results(rules, stack, pending.step);
    } catch (const std::exception& error) {
      end_locked(error.what());
    }
  }

  // The steps from `begin` on that make the wanted storages, what has to be given to them, and why
  // they would not make the same bits.
  std::tuple<std::shared_ptr<Rerun>, std::vector<Given>, std::string> program(
      int64_t begin, const std::vector<int64_t>& wanted, const std::unordered_set<int64_t>& there,
      const std::vector<Tensor>& like) {
    const Locked lock(mutex_);
    try {
      auto [made, given] = chosen(static_cast<size_t>(begin), wanted, there);
      for (size_t i = 0; i < like.size(); i++) made->layouts.emplace_back(wanted.at(i), like[i]);
      std::vector<Given> found;
      for (const int64_t number : given) {
        const auto met = given_.find(number);
        if (met == given_.end())
          found.emplace_back(number, std::nullopt, 0);
        else
          found.emplace_back(number, met->second.first, met->second.second);
      }
      return {made, found, ""};
    } catch (const Foreign& error) {
      return {nullptr, {}, error.what()};
    }
  }

 private:
  void end_locked(const std::string& why) {
    if (ended_.empty()) ended_ = why;
  }

  int64_t count(const Tensor& tensor, int64_t step) {
    const auto number = static_cast<int64_t>(made_at_.size());
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    references_.emplace_back(tensor.storage().getWeakStorageImpl());
    numbers_[storage] = number;
    versions_.push_back(tensor._version());
    made_at_.push_back(step);
    return number;
  }

  Ref taken(const Tensor& tensor, std::vector<int64_t>& reads) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (impl->is_python_dispatch()) throw Foreign("an operation reads a tensor of another class");
    if (impl->layout() != at::kStrided || tensor.is_nested() || !tensor.has_storage())
      throw Foreign("an operation reads a tensor of another layout");
    if (tensor.is_conj() || tensor.is_neg())
      throw Foreign("an operation reads numbers that are kept with another sign");
    const int64_t version = tensor._version();
    const auto found = numbers_.find(tensor.storage().unsafeGetStorageImpl());
    int64_t number = -1;
    if (found == numbers_.end()) {
      number = count(tensor, -1);
      given_.emplace(number, std::make_pair(tensor, version));
    } else {
      number = found->second;
      if (versions_[number] != version)
        throw Foreign("a tensor was written to by what is no operation");
    }
    reads.push_back(number);
    return Ref(number, tensor);
  }

  Argument argument(const IValue& value, std::vector<int64_t>& reads) {
    Argument found;
    // A number where a tensor is wanted is a tensor that nobody else has.
    const auto plain = [](const Tensor& one) {
      return !one.defined() || one.unsafeGetTensorImpl()->is_wrapped_number();
    };
    if (value.isTensor() && !plain(value.toTensor())) {
      found.kind = Kind::One;
      found.refs.push_back(taken(value.toTensor(), reads));
    } else if (value.isTensorList()) {
      found.kind = Kind::List;
      for (const Tensor& one : value.toTensorVector()) found.refs.push_back(taken(one, reads));
    } else if (value.isOptionalTensorList()) {
      found.kind = Kind::OptionalList;
      for (const std::optional<Tensor> one : value.toOptionalTensorList())
        found.refs.push_back(one && one->defined() ? taken(*one, reads) : Ref());
    } else if (value.isGenerator()) {
      throw Foreign("a generator of the program's is drawn from");
    } else {
      found.constant = value;
    }
    return found;
  }

  std::shared_ptr<Step> arguments(const c10::OperatorHandle& operation, const Rules& rules,
                                  const Stack& stack) {
    const size_t count = operation.schema().arguments().size();
    const auto* values = stack.data() + (stack.size() - count);
    auto step = std::make_shared<Step>(Step{operation, &rules, {}, {}, {}, {}, {}, {}, false});
    step->arguments.reserve(count);
    // Trained, batch norm updates the statistics of the run, which its schema does not say, and
    // does not read them.
    const bool trained = rules.norm && values[5].toBool();
    for (size_t i = 0; i < count; i++) {
      if (trained && (i == 3 || i == 4)) {
        if (values[i].isTensor() && values[i].toTensor().defined()) {
          std::vector<int64_t> unread;
          step->writes.push_back(taken(values[i].toTensor(), unread).storage);
        }
        step->arguments.emplace_back();
        continue;
      }
      step->arguments.push_back(argument(values[i], step->reads));
    }
    for (const size_t position : rules.writes)
      for (const Ref& ref : step->arguments[position].refs)
        if (ref.storage >= 0) {
          step->writes.push_back(ref.storage);
          versions_[ref.storage]++;
        }
    if (!blank_.empty()) fill(rules, *step);
    if (rules.random) {
      c10::Device device = at::kCPU;
      bool known = false;
      for (size_t i = 0; i < count && !known; i++)
        if (values[i].isTensor() && values[i].toTensor().defined()) {
          device = values[i].toTensor().device();
          known = true;
        }
      for (size_t i = 0; i < count && !known; i++)
        if (values[i].isDevice()) device = values[i].toDevice();
      step->generator = at::globalContext().defaultGenerator(device);
      step->state = state_of(*step->generator);
    }
    return step;
  }

  // `_puts_all` of recording.py.
  static bool puts_all(const Step& step) {
    const auto& [target, indices] = std::tie(step.arguments[0], step.arguments[1]);
    if (target.kind != Kind::One || indices.refs.size() != 1 || step.arguments[3].constant.toBool())
      return false;
    const Ref& index = indices.refs[0];
    return index.storage >= 0 && index.dtype == at::kLong && index.size.size() == 1 &&
           index.size == target.refs[0].size;
  }

  // `_in_rows` of recording.py.
  static bool in_rows(const Step& step) {
    const auto& [tensor, dim] = std::tie(step.arguments[0], step.arguments[1]);
    if (tensor.kind != Kind::One || !dim.constant.isInt()) return false;
    const auto& size = tensor.refs[0].size;
    if (size.empty()) return false;
    const int64_t along = dim.constant.toInt(), dimensions = static_cast<int64_t>(size.size());
    return c10::multiply_integers(size) != size[along < 0 ? along + dimensions : along];
  }

  // What was not set may only be set now.
  void fill(const Rules& rules, const Step& step) {
    std::set<int64_t> met(step.reads.begin(), step.reads.end());
    met.insert(step.writes.begin(), step.writes.end());
    for (const int64_t number : met) {
      const auto blank = blank_.find(number);
      if (blank == blank_.end()) continue;
      size_t times = 0;
      for (const auto& argument : step.arguments)
        for (const Ref& ref : argument.refs) times += ref.storage == number;
      const bool sets = (rules.fills || (rules.puts && puts_all(step))) && times == 1 &&
                        step.arguments[0].kind == Kind::One &&
                        step.arguments[0].refs[0].storage == number;
      if (!sets) throw Foreign("memory is read that no operation has set");
      if (blank->second.set(step.arguments[0].refs[0])) blank_.erase(blank);
    }
  }

  void results(const Rules& rules, const Stack& stack, const std::shared_ptr<Step>& step) {
    const size_t count = step->operation.schema().returns().size();
    std::vector<Tensor> made;
    for (size_t i = stack.size() - count; i < stack.size(); i++) leaves(stack[i], made);
    bool sums = false;
    for (size_t place = 0; place < made.size(); place++) {
      const Tensor& result = made[place];
      if (!result.defined()) continue;
      if (!result.has_storage()) throw Foreign("an operation makes a tensor of another layout");
      sums |= result.is_floating_point();
      if (numbers_.count(result.storage().unsafeGetStorageImpl())) continue;
      const int64_t number = this->count(result, static_cast<int64_t>(steps_.size()));
      step->makes.emplace_back(place, number);
      if (rules.memory) blank_.emplace(number, UnsetMemory(result.nbytes()));
    }
    if (step->makes.empty() && step->writes.empty()) return;
    const bool unordered = rules.unordered && !(rules.scans && in_rows(*step));
    step->refused = rules.refused || (sums && unordered);
    steps_.push_back(step);
  }

  std::pair<std::shared_ptr<Rerun>, std::vector<int64_t>> chosen(
      size_t begin, const std::vector<int64_t>& wanted, const std::unordered_set<int64_t>& there) {
    if (!ended_.empty()) throw Foreign(ended_);  // operations of the call may be missing
    for (const int64_t number : wanted)
      if (number < 0 || made_at_[number] < static_cast<int64_t>(begin))
        throw Foreign("what was saved was not made in the call");
    std::unordered_set<int64_t> written, needed(wanted.begin(), wanted.end());
    std::set<int64_t> given;
    for (size_t i = begin; i < steps_.size(); i++)
      written.insert(steps_[i]->writes.begin(), steps_[i]->writes.end());
    for (const int64_t number : needed)
      if (blank_.count(number)) throw Foreign("memory is read that no operation has set");
    auto program = std::make_shared<Rerun>();
    program->wanted = wanted;
    for (size_t i = steps_.size(); i-- > begin;) {
      const Step& step = *steps_[i];
      bool use = false;
      for (const auto& [_, number] : step.makes) use |= needed.count(number) > 0;
      for (const int64_t number : step.writes) use |= needed.count(number) > 0;
      if (!use) continue;
      if (step.refused) throw Foreign(step.rules->name + " may give something else the next time");
      program->steps.push_back(steps_[i]);
      for (const int64_t number : step.reads) {
        const bool before = made_at_[number] < static_cast<int64_t>(begin);
        if (before || (!written.count(number) && there.count(number)))
          given.insert(number);
        else
          needed.insert(number);
      }
    }
    for (const int64_t number : given)
      if (written.count(number)) throw Foreign("the call has written to what it reads");
    std::reverse(program->steps.begin(), program->steps.end());
    program->finish();
    return {program, {given.begin(), given.end()}};
  }

  std::mutex mutex_;  // other threads come here without the interpreter's lock
  std::vector<std::shared_ptr<Step>> steps_;
  std::unordered_map<c10::StorageImpl*, int64_t> numbers_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> references_;  // keep addresses from reuse
  std::vector<int64_t> versions_, made_at_;
  std::unordered_map<int64_t, std::pair<Tensor, int64_t>> given_;
  std::unordered_map<int64_t, UnsetMemory> blank_;  // storages not set as a whole since then
  std::string ended_;
};

// --- recording -----------------------------------------------------------------------------------

std::mutex present_mutex;
std::shared_ptr<Recorder> present;  // what records now
std::mutex rules_mutex;
std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Rules>> rules_known;

const Rules* rules_of(const c10::OperatorHandle& operation) {
  const c10::FunctionSchema* schema = &operation.schema();
  {
    std::lock_guard<std::mutex> lock(rules_mutex);
    const auto found = rules_known.find(schema);
    if (found != rules_known.end()) return found->second.get();
  }
  auto rules = std::make_unique<Rules>();
  {
    py::gil_scoped_acquire gil;
    const py::object asked = py::module_::import("kilter.memory.engine.recording")
                                 .attr("rules_named")(schema->name(), schema->overload_name());
    rules->name = asked.attr("full_name").cast<std::string>();
    rules->text = PyUnicode_InternFromString(rules->name.c_str());
    rules->ends = asked.attr("ends").cast<std::string>();
    rules->looks = asked.attr("looks").cast<bool>();
    rules->refused = asked.attr("refused").cast<bool>();
    rules->unordered = asked.attr("unordered").cast<bool>();
    rules->random = asked.attr("random").cast<bool>();
    rules->memory = asked.attr("memory").cast<bool>();
    rules->fills = asked.attr("fills").cast<bool>();
    rules->puts = asked.attr("puts").cast<bool>();
    rules->norm = asked.attr("norm").cast<bool>();
    rules->scans = asked.attr("scans").cast<bool>();
    rules->writes = asked.attr("writes").cast<std::vector<size_t>>();
  }
  std::lock_guard<std::mutex> lock(rules_mutex);
  return rules_known.emplace(schema, std::move(rules)).first->second.get();
}

void met(const c10::OperatorHandle& operation, Stack* stack) {
  const Unrecorded unrecorded;
  std::shared_ptr<Recorder> recorder;
  {
    std::lock_guard<std::mutex> lock(present_mutex);
    recorder = present;
  }
  const Rules* rules = nullptr;
  if (recorder) {
    try {
      rules = rules_of(operation);
    } catch (const std::exception& error) {
      recorder->end(error.what());
    }
  }
  if (rules == nullptr || (rules->looks && rules->ends.empty())) {
    operation.callBoxed(stack);
    return;
  }
  Pending pending;
  recorder->before(operation, *rules, *stack, pending);
  try {
    operation.callBoxed(stack);
  } catch (...) {
    recorder->end("an operation has failed");
    throw;
  }
  recorder->after(*rules, *stack, pending);
}

std::unique_ptr<torch::Library> library;  // as long as it lives the kernel is registered

// Whether operations come to `met`.
void listen(bool on) {
  library.reset();
  if (!on) return;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&met>());
}

// `kept` gets what autograd is given for tensors that are left to it meanwhile.
void record(std::shared_ptr<Recorder> recorder, py::object kept) {
  {
    std::lock_guard<std::mutex> lock(present_mutex);
    recording = recorder != nullptr;
    present.swap(recorder);  // the one before is freed by the caller, who holds the lock of Python
  }
  PyObject* before = std::exchange(kept_meanwhile, recording ? kept.release().ptr() : nullptr);
  Py_XDECREF(before);
}

// `unrecorded` of recording.py.
PyObject* unrecorded(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const Unrecorded now;
  return PyObject_Vectorcall(arguments[0], arguments + 1, static_cast<size_t>(count - 1), nullptr);
}

PyMethodDef recording_functions[] = {
    {"unrecorded", plain_function(unrecorded), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Rerun, std::shared_ptr<Rerun>>(m, "Rerun")
      .def("operations", &Rerun::operations)
      .def("run", torch::wrap_pybind_function_no_gil(
                      [](const Rerun& self, Bases bases) { return self.run(std::move(bases)); }));
  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "Recorder")
      .def(py::init<>())
      .def("end", &Recorder::end)
      .def("position", &Recorder::position)
      .def("numbers_of", &Recorder::numbers_of)
      .def("kept_since", &Recorder::kept_since)
      .def("made_at", &Recorder::made_at)
      .def("program", &Recorder::program);
  m.def("listen", torch::wrap_pybind_function(listen));
  m.def("record", &record);
  m.def("name", &name);
  PyModule_AddFunctions(m.ptr(), recording_functions);
  PyModule_AddFunctions(m.ptr(), saved_tensor_functions);
  PyModule_AddFunctions(m.ptr(), small_copies_functions);
  py::class_<CopyCalls>(m, "CopyCalls")
      .def(py::init<Address, Address, Address, Address, Address, Address, Address, size_t, size_t>())
      .def("start", &CopyCalls::start)
      .def("hold", &CopyCalls::hold);
  py::class_<NormKernel>(m, "NormKernel")
      .def(py::init<Address, Address, unsigned, unsigned, py::object>())
      .def("launch", &NormKernel::launch);
  define_allocated_bytes(m);
  py::class_<OperatorCalls>(m, "OperatorCalls");
  py::class_<ResolvedRecipe>(m, "ResolvedRecipe")
      .def(py::init<py::object, const py::object&, const py::object&, const py::object&>());
  m.attr("Position") = py::reinterpret_steal<py::object>(PyType_FromSpec(&position_type));
}
