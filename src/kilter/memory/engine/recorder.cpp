// Records the operations that run in the call of a module, and runs them again: what recording.py
// does, without Python for each operation. What holds for an operation is asked of Python once.
// Below that, what tensor_hooks.py and store.py find out about each saved tensor.

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;
constexpr auto kKey = c10::DispatchKey::Fake;  // nothing else uses it

struct Foreign : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Rules {
  std::string name, ends;
  bool looks, refused, unordered, random, memory, fills, norm;
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

  std::vector<std::string> operations() const {
    std::vector<std::string> names;
    for (const auto& step : steps) names.push_back(step->rules->name);
    return names;
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
    if (impl->layout() != at::kStrided || tensor.is_complex() || tensor.is_nested() ||
        !tensor.has_storage())
      throw Foreign("an operation reads a tensor of another layout");
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

  // What was not set may only be set as a whole now.
  void fill(const Rules& rules, const Step& step) {
    std::set<int64_t> met(step.reads.begin(), step.reads.end());
    met.insert(step.writes.begin(), step.writes.end());
    for (const int64_t number : met) {
      const auto blank = blank_.find(number);
      if (blank == blank_.end()) continue;
      const bool one = rules.fills && !step.arguments.empty() && step.arguments[0].kind == Kind::One;
      const Ref* target = one ? &step.arguments[0].refs[0] : nullptr;
      if (target == nullptr || target->storage != number || target->offset != 0 ||
          c10::multiply_integers(target->size) != blank->second)
        throw Foreign("memory is read that no operation has set");
      blank_.erase(blank);
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
      if (rules.memory) blank_[number] = result.numel();
    }
    if (step->makes.empty() && step->writes.empty()) return;
    step->refused = rules.refused || (sums && rules.unordered);
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
  std::unordered_map<int64_t, int64_t> blank_;  // storages not set since they were made: elements
  std::string ended_;
};

// --- recording -----------------------------------------------------------------------------------

std::mutex present_mutex;
std::shared_ptr<Recorder> present;  // what records now
std::atomic<bool> recording{false};
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
    rules->ends = asked.attr("ends").cast<std::string>();
    rules->looks = asked.attr("looks").cast<bool>();
    rules->refused = asked.attr("refused").cast<bool>();
    rules->unordered = asked.attr("unordered").cast<bool>();
    rules->random = asked.attr("random").cast<bool>();
    rules->memory = asked.attr("memory").cast<bool>();
    rules->fills = asked.attr("fills").cast<bool>();
    rules->norm = asked.attr("norm").cast<bool>();
    rules->writes = asked.attr("writes").cast<std::vector<size_t>>();
  }
  std::lock_guard<std::mutex> lock(rules_mutex);
  return rules_known.emplace(schema, std::move(rules)).first->second.get();
}

struct Unrecorded {
  Unrecorded() { c10::impl::tls_set_dispatch_key_included(kKey, false); }
  ~Unrecorded() { c10::impl::tls_set_dispatch_key_included(kKey, recording); }
};

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

void record(std::shared_ptr<Recorder> recorder) {
  std::lock_guard<std::mutex> lock(present_mutex);
  recording = recorder != nullptr;
  present.swap(recorder);  // the one before is freed by the caller, who holds the lock of Python
}

// --- saved tensors -------------------------------------------------------------------------------

// Each function has its double in Python, which is asked (None is given) where a tensor is not an
// ordinary one. Nothing in here goes through the dispatcher.

// Of Python; never freed.
struct Names {
  PyObject *tensor, *parameter, *itself, *view, *size, *leaf, *modes, *level, *dtype, *attributes;
};
Names names;

void name(const py::object& itself, const py::object& view, const py::object& leaf) {
  const auto own = [](const py::object& object) { return py::object(object).release().ptr(); };
  const auto torch = py::module_::import("torch");
  const auto modes = py::module_::import("torch.autograd.forward_ad").attr("__dict__");
  names = {own(torch.attr("Tensor")),
           own(torch.attr("nn").attr("Parameter")),
           own(itself),
           own(view),
           own(torch.attr("Size")),
           own(leaf),
           own(modes),
           PyUnicode_InternFromString("_current_level"),
           PyUnicode_InternFromString("dtype"),
           PyUnicode_InternFromString("attributes")};
}

// The program's operations are counted, changed or recorded, or have tangents.
bool under_a_mode() {
  if (c10::impl::TorchDispatchModeTLS::stack_len() || at::impl::PythonTorchFunctionTLS::stack_len())
    return true;
  PyObject* level = PyDict_GetItemWithError(names.modes, names.level);
  return level == nullptr || PyLong_AsLong(level) >= 0;
}

bool of_class(PyObject* object, PyObject* kind) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == kind;
}

// A tensor of the framework's own class, dense, and neither lazy nor in a transform.
bool ordinary(PyObject* object) {
  if (!of_class(object, names.tensor) && !of_class(object, names.parameter)) return false;
  const auto* impl = THPVariable_Unpack(object).unsafeGetTensorImpl();
  const auto known = c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView}) |
                     c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
  const auto others = impl->key_set() - known;
  return (others.raw_repr() & ~c10::full_backend_mask) == 0 && impl->has_storage() &&
         !impl->has_symbolic_sizes_strides();
}

// The Python object of what a tensor is a view of, or none.
py::object base_of(const Tensor& tensor) {
  if (!tensor.is_view()) return {};
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor._base()));
}

// As `tensor.detach()`: another tensor on the same memory, with the same counter of versions.
py::object detached(const Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  auto alias = impl->shallow_copy_and_detach(impl->version_counter(), true);
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(Tensor(std::move(alias))));
}

py::object itself_of(PyObject* object) {
  auto made = py::reinterpret_steal<py::object>(PyObject_CallOneArg(names.itself, object));
  if (!made) throw python_error();
  auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  if (!own) throw python_error();
  const bool any = of_class(object, names.tensor) && PyDict_GET_SIZE(own.ptr());
  if (PyObject_SetAttr(made.ptr(), names.attributes, any ? own.ptr() : Py_None))
    throw python_error();
  return made;
}

// A tuple, or one of a class derived from it.
PyObject* empty(PyObject* kind, size_t count) {
  auto* type = reinterpret_cast<PyTypeObject*>(kind);
  PyObject* made = type->tp_alloc(type, static_cast<Py_ssize_t>(count));
  if (made == nullptr) throw python_error();
  return made;
}

PyObject* const plain_tuple = reinterpret_cast<PyObject*>(&PyTuple_Type);

template <class... Items>
PyObject* tuple_of(PyObject* kind, const Items&... items) {
  PyObject* made = empty(kind, sizeof...(items));
  Py_ssize_t place = 0;
  (PyTuple_SET_ITEM(made, place++, items.inc_ref().ptr()), ...);
  return made;
}

py::object numbers(PyObject* kind, at::IntArrayRef values) {
  PyObject* made = empty(kind, values.size());
  for (size_t i = 0; i < values.size(); i++)
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(values[i]));
  return py::reinterpret_steal<py::object>(made);
}

// `kept` of store.py.
template <class... Items>
PyObject* keep(PyObject* object, const Tensor& tensor, const py::object& base, Items... more) {
  const auto version = py::int_(tensor._version());
  if (tensor.is_leaf() || (base && of_class(base.ptr(), names.parameter)))
    return tuple_of(plain_tuple, py::handle(object), version, py::handle(names.leaf), more...);
  return tuple_of(plain_tuple, detached(tensor), version, itself_of(object), more...);
}

// `Store.kept`: of a tensor, and what is to follow.
PyObject* kept(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* object = arguments[0];
  if (!ordinary(object)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  return keep(object, tensor, base_of(tensor), py::handle(arguments[1]), py::handle(arguments[2]));
  END_HANDLE_TH_ERRORS
}

py::object address(const c10::Storage& storage) {
  return py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(storage.unsafeGetStorageImpl()));
}

// What autograd holds instead of a tensor, or size and address of its storage if the engine takes
// it (`TensorHooks.takes`). Of a tensor, the engine's device, and the least bytes that it takes.
PyObject* pack(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* object = arguments[0];
  if (under_a_mode() || !ordinary(object)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  const auto base = base_of(tensor);
  const auto least = static_cast<size_t>(PyLong_AsLongLong(arguments[2]));
  const bool own = of_class(object, names.tensor) && (!base || of_class(base.ptr(), names.tensor));
  if (!own || tensor.nbytes() < least ||
      tensor.device() != reinterpret_cast<THPDevice*>(arguments[1])->device ||
      (tensor.requires_grad() && tensor.is_leaf()))
    return keep(object, tensor, base);
  const c10::Storage& storage = tensor.storage();
  const size_t size_bytes = storage.nbytes();
  const Tensor& whole = base ? THPVariable_Unpack(base.ptr()) : tensor;
  if (!whole.has_storage() ||
      whole.storage().unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) Py_RETURN_NONE;
  if (whole.nbytes() != size_bytes || size_bytes < least || !storage.resizable())
    return keep(object, tensor, base);
  // Python knows what other allocators there are for the CPU.
  if (!tensor.is_cuda() &&
      storage.data_ptr().get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter())
    Py_RETURN_NONE;
  return tuple_of(plain_tuple, py::int_(size_bytes), address(storage));
  END_HANDLE_TH_ERRORS
}

// `covers` of store.py.
bool covers(const Tensor& tensor, size_t size_bytes) {
  return tensor.nbytes() == size_bytes && tensor.storage_offset() == 0 &&
         (tensor.is_contiguous() ||
          (tensor.dim() == 4 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast)));
}

// `held` of store.py.
PyObject* held(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!ordinary(object)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  const Tensor whole(tensor.is_view() ? tensor._base() : tensor);
  const bool plain = covers(whole, tensor.storage().nbytes());
  return tuple_of(plain_tuple, detached(plain ? whole : tensor), py::int_(tensor._version()),
                  py::bool_(plain));
  END_HANDLE_TH_ERRORS
}

// `Store.view`: of the saved storage, its alias, whether that is plain, and the tensor.
PyObject* view(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* object = arguments[3];
  if (!ordinary(object) || !ordinary(arguments[1])) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  const Tensor& alias = THPVariable_Unpack(arguments[1]);
  const auto saved = py::handle(arguments[0]);
  const auto itself = itself_of(object);
  const auto dtype = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, names.dtype));
  if (!dtype) throw python_error();
  if (arguments[2] == Py_True && tensor.scalar_type() == alias.scalar_type() &&
      tensor.sizes() == alias.sizes() && tensor.strides() == alias.strides())
    return tuple_of(names.view, saved, itself, dtype, py::none(), py::tuple(0), py::int_(0));
  return tuple_of(names.view, saved, itself, dtype, numbers(names.size, tensor.sizes()),
                  numbers(plain_tuple, tensor.strides()), py::int_(tensor.storage_offset()));
  END_HANDLE_TH_ERRORS
}

std::vector<int64_t> integers(PyObject* tuple) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
  return found;
}

// As `alias.as_strided(size, stride, offset)`, but no view.
PyObject* laid_out(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!ordinary(arguments[0])) Py_RETURN_NONE;
  const auto* alias = THPVariable_Unpack(arguments[0]).unsafeGetTensorImpl();
  auto made = alias->shallow_copy_and_detach(alias->version_counter(), true);
  made->set_sizes_and_strides(integers(arguments[1]), integers(arguments[2]),
                              PyLong_AsLongLong(arguments[3]));
  return THPVariable_Wrap(Tensor(std::move(made)));
  END_HANDLE_TH_ERRORS
}

// `_is_cast_of_parameter` of store.py.
PyObject* is_cast_of_parameter(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!ordinary(object)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  const auto node = (tensor.is_view() ? tensor._base() : tensor).grad_fn();
  if (!node || node->name() != "ToCopyBackward0") Py_RETURN_FALSE;
  const auto* before = node->next_edge(0).function.get();
  return PyBool_FromLong(dynamic_cast<const torch::autograd::AccumulateGrad*>(before) != nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject* is_under_a_mode(PyObject*, PyObject*) { return PyBool_FromLong(under_a_mode()); }

// `unrecorded` of recording.py.
PyObject* unrecorded(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const Unrecorded now;
  return PyObject_Vectorcall(arguments[0], arguments + 1, static_cast<size_t>(count - 1), nullptr);
}

template <class Function>
PyCFunction plain_function(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef functions[] = {
    {"under_a_mode", is_under_a_mode, METH_NOARGS, nullptr},
    {"pack", plain_function(pack), METH_FASTCALL, nullptr},
    {"kept", plain_function(kept), METH_FASTCALL, nullptr},
    {"held", held, METH_O, nullptr},
    {"view", plain_function(view), METH_FASTCALL, nullptr},
    {"laid_out", plain_function(laid_out), METH_FASTCALL, nullptr},
    {"is_cast_of_parameter", is_cast_of_parameter, METH_O, nullptr},
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
      .def("made_at", &Recorder::made_at)
      .def("program", &Recorder::program);
  m.def("listen", torch::wrap_pybind_function(listen));
  m.def("record", &record);
  m.def("name", &name);
  PyModule_AddFunctions(m.ptr(), functions);
}
