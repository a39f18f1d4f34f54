// What leaves the device and comes back at the events of a plan: `DueMoves` of pass_under_plan.py and
// what it asks of store.py, as long as nothing is out of the ordinary. Each copy is one call of the
// backend.

#pragma once

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>

#include "saved_tensors.h"

namespace {

constexpr auto kKey = c10::DispatchKey::Fake;  // nothing else uses it
std::atomic<bool> recording{false};  // operations of a call of a module are being recorded
PyObject* kept_meanwhile = nullptr;  // the list of what autograd is given and the engine does not follow

// Nothing is recorded while it lives.
struct Unrecorded {
  Unrecorded() { c10::impl::tls_set_dispatch_key_included(kKey, false); }
  ~Unrecorded() { c10::impl::tls_set_dispatch_key_included(kKey, recording); }
};

// One event of a plan, as `packed_steps` of ready.py writes it. What is due are numbers of tensors.
struct PlannedStep {
  long long expected;
  long long code;
  long long kind;
  long long called, read;  // a call is recomputed that makes the tensor; it is read for recomputing
  long long version;
  long long due_begin, offloads, evictions, prefetches;
};
constexpr long long kKept = 0, kTaken = 1, kRecomputed = 2;

// Of the pass under its plan; all are held.
struct References {
  PyObject *hooks;     // `TensorHooks`, which sees to what is out of the ordinary
  PyObject *overdue;   // dict: by number, what the program holds yet, as `DueMoves.overdue`
  PyObject *lent;      // list: while something is in it, all is left to Python
  PyObject *followed;  // dict: by number, weak references to the saved storages of the pass
  PyObject *read;      // gives the recipe of a tensor, or None
  PyObject *attend;    // has Python see to what is due, and to a tensor that backward needs
  // From here on of the hooks.
  PyObject *fence;  // of kilter, or None
  PyObject *device, *store;
  // From here on given by `follow`.
  PyObject *steps, *due;  // bytes
  PyObject *hosts;        // dict: host memory by number
  PyObject *recipes;      // dict: resolved recipes by number
  PyObject *within;       // weak reference to the present pass, or None
  PyObject *calls;        // `ModuleCalls`, or None
};
constexpr Py_ssize_t kHooks = offsetof(References, fence) / sizeof(PyObject*);
constexpr Py_ssize_t kGiven = offsetof(References, steps) / sizeof(PyObject*);
constexpr Py_ssize_t kReferences = sizeof(References) / sizeof(PyObject*);

struct Position {
  PyObject_HEAD
  long long event;
  References held;
  size_t least_bytes;
  long lone_users;       // the storage of a tensor that nobody else holds has so many users
  c10::StreamId stream;  // of the pass
};

PyObject*& held_by(Position* self, Py_ssize_t place) {
  return reinterpret_cast<PyObject**>(&self->held)[place];
}

// An error of ours: kilter steps aside, and nothing more is done here.
struct Aside {};

// Calls a function of ours behind the fence. What the program raises meanwhile passes.
template <class... Arguments>
py::object ask(const Position* self, PyObject* function, Arguments... arguments) {
  if (self->held.fence == Py_None)
    return owned(PyObject_CallFunctionObjArgs(function, arguments..., nullptr));
  PyObject* all[] = {self->held.fence, function, arguments...};
  const auto found = owned(PyObject_VectorcallMethod(names.ask, all, std::size(all), nullptr));
  if (PyList_GET_SIZE(found.ptr()) == 0) throw Aside();
  return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(found.ptr(), 0));
}

// What a weak reference refers to, or None. (Held, since any allocation may collect garbage.)
py::object referred_to(PyObject* reference) {
  return py::reinterpret_borrow<py::object>(
      reference == Py_None ? Py_None : PyWeakref_GetObject(reference));
}

py::object attribute(PyObject* object, PyObject* name) {
  return owned(PyObject_GetAttr(object, name));
}

long long integer(PyObject* object, PyObject* name) {
  return PyLong_AsLongLong(attribute(object, name).ptr());
}

void set_attribute(PyObject* object, PyObject* name, long long value) {
  if (PyObject_SetAttr(object, name, py::int_(value).ptr())) throw python_error();
}

// `SavedBytes.hold` of saved_bytes.py.
void hold(const Position* self, PyObject* counts, long long change_bytes) {
  const long long held_bytes = integer(counts, names.held_bytes) + change_bytes;
  set_attribute(counts, names.held_bytes, held_bytes);
  const long long all_bytes = held_bytes + integer(counts, names.beside_bytes);
  for (PyObject* peak_bytes : {names.segment_peak_bytes, names.held_peak_bytes}) {
    if (all_bytes <= integer(counts, peak_bytes)) break;
    set_attribute(counts, peak_bytes, all_bytes);
  }
  const auto tell = attribute(counts, names.tell);
  if (!tell.is_none()) ask(self, tell.ptr(), py::int_(all_bytes).ptr());
}

void add(PyObject* counts, PyObject* name, long long more) {
  set_attribute(counts, name, integer(counts, name) + more);
}

// The saved storage of this number, while autograd may still ask for it, or None.
py::object followed(const Position* self, PyObject* number) {
  PyObject* found = PyDict_GetItemWithError(self->held.followed, number);
  return referred_to(found == nullptr ? Py_None : found);
}

bool alone(const Position* self, PyObject* alias) { return alone(alias, self->lone_users); }

// `Store.pending`.
bool pending(PyObject* saved) {
  return number_in(saved, slots.state) == kResident && slot(saved, slots.handed_out) == Py_False;
}

bool as_saved(PyObject* saved, PyObject* alias) {
  return THPVariable_Unpack(alias)._version() == number_in(saved, slots.version);
}

// Of its copies one to the host was started.
bool departs(PyObject* saved) {
  PyObject* transfer = slot(saved, slots.transfer);
  return transfer != Py_None && slot(transfer, slots.departure) != Py_None;
}

// `Saved.closed` and `Saved.unchanged`.
bool closed(const Position* self, PyObject* saved) {
  PyObject* alias = slot(saved, slots.alias);
  if (alias == Py_None || number_in(saved, slots.state) != kResident) return true;
  if (departs(saved) && slot(saved, slots.handed_out) == Py_False) return true;
  return ordinary(alias) && alone(self, alias);
}

bool unchanged(PyObject* saved) {
  PyObject* alias = slot(saved, slots.alias);
  return slot(saved, slots.touched) == Py_False && (alias == Py_None || as_saved(saved, alias));
}

// `Recipe.ready` of recompute.py.
bool is_ready(const Position* self, PyObject* recipe) {
  const auto all = [recipe](Py_ssize_t place, const auto& holds) {
    PyObject* found = slot(recipe, place);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(found); i++)
      if (!holds(PyTuple_GET_ITEM(found, i))) return false;
    return true;
  };
  return all(slots.closed, [self](PyObject* saved) { return closed(self, saved); }) &&
         all(slots.sources, unchanged) &&
         all(slots.parameters,
             [](PyObject* read) {
               return THPVariable_Unpack(slot(read, slots.read_tensor))._version() ==
                      number_in(read, slots.read_version);
             }) &&
         (slot(recipe, slots.in_backward) == Py_False ||
          torch::autograd::get_current_graph_task_id() != -1);
}

// Whoever changes what a recipe reads has the tensor recomputed before: `Recipe.read`.
void tell(const Position* self, PyObject* recipe, PyObject* saved) {
  const auto dependents = attribute(self->held.store, names.dependents);
  const auto reference = owned(PyWeakref_NewRef(saved, nullptr));
  const auto note = [&](PyObject* read) {
    const auto source = owned(PyLong_FromVoidPtr(read));
    const auto none = owned(PyList_New(0));
    PyObject* known = PyDict_SetDefault(dependents.ptr(), source.ptr(), none.ptr());
    if (known == nullptr || PyList_Append(known, reference.ptr())) throw python_error();
  };
  PyObject* sources = slot(recipe, slots.sources);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); i++) note(PyTuple_GET_ITEM(sources, i));
  PyObject* parameters = slot(recipe, slots.parameters);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parameters); i++) {
    PyObject* tensor = slot(PyTuple_GET_ITEM(parameters, i), slots.read_tensor);
    note(root_of(tensor).ptr());
  }
  put(recipe, slots.told, Py_NewRef(Py_True));
}

// `Store._leave`.
void leave(const Position* self, PyObject* saved, const py::object& alias) {
  put(saved, slots.state, PyLong_FromLongLong(kEvicted));
  put(saved, slots.alias, Py_NewRef(Py_None));
  const auto resident = attribute(self->held.store, names.resident);
  PyObject* key = slot(saved, slots.key);
  if (PyDict_Contains(resident.ptr(), key) && PyDict_DelItem(resident.ptr(), key))
    throw python_error();
  const auto counts = attribute(self->held.store, names.counts);
  const long long size_bytes = number_in(saved, slots.size_bytes);
  add(counts.ptr(), names.evicted, 1);
  add(counts.ptr(), names.evicted_bytes, size_bytes);
  const auto backend = attribute(self->held.store, names.backend);
  if (attribute(backend.ptr(), names.spoils).ptr() == Py_True && alone(self, alias.ptr())) {
    const auto storage = owned(PyObject_CallMethodNoArgs(alias.ptr(), names.untyped_storage));
    owned(PyObject_CallMethodOneArg(backend.ptr(), names.evicted, storage.ptr()));
  }
  hold(self, counts.ptr(), -size_bytes);
}

enum class Tried { kDone, kNotYet, kLeftToPython };

py::object new_transfer() {
  auto* type = reinterpret_cast<PyTypeObject*>(names.transfer);
  auto made = owned(type->tp_alloc(type, 0));
  for (const Py_ssize_t place : {slots.host, slots.pooled, slots.departure, slots.arrival})
    put(made.ptr(), place, Py_NewRef(Py_None));
  return made;
}

py::object of_backend(const Position* self, PyObject* name) {
  return attribute(attribute(self->held.store, names.backend).ptr(), name);
}

// `Store.offload`.
Tried offload(const Position* self, PyObject* saved, PyObject* host) {
  const auto alias = py::reinterpret_borrow<py::object>(slot(saved, slots.alias));
  if (alias.is_none() || departs(saved)) return Tried::kDone;
  if (!ordinary(alias.ptr())) return Tried::kLeftToPython;
  if (!pending(saved) || !as_saved(saved, alias.ptr()) || !alone(self, alias.ptr()))
    return Tried::kNotYet;
  if (slot(saved, slots.plain) != Py_True || !ordinary(host) ||
      !same_layout(THPVariable_Unpack(host), THPVariable_Unpack(alias.ptr())))
    return Tried::kLeftToPython;
  const auto departure = ask(self, of_backend(self, names.copy_out).ptr(), host, alias.ptr());
  if (slot(saved, slots.transfer) == Py_None)
    put(saved, slots.transfer, new_transfer().release().ptr());
  PyObject* transfer = slot(saved, slots.transfer);
  put(transfer, slots.host, Py_NewRef(host));
  put(transfer, slots.departure, departure.inc_ref().ptr());
  const auto counts = attribute(self->held.store, names.counts);
  add(counts.ptr(), names.out_bytes, number_in(saved, slots.size_bytes));
  return Tried::kDone;
}

// `Store.evict`, of what is on the host or has a recipe of its own.
Tried evict(const Position* self, PyObject* saved) {
  if (!pending(saved)) return Tried::kDone;
  const auto alias = py::reinterpret_borrow<py::object>(slot(saved, slots.alias));
  if (!ordinary(alias.ptr())) return Tried::kLeftToPython;
  if (departs(saved)) {
    if (!as_saved(saved, alias.ptr())) return Tried::kLeftToPython;
    ask(self, of_backend(self, names.wait).ptr(), slot(slot(saved, slots.transfer), slots.departure));
  } else {
    const auto recipe = py::reinterpret_borrow<py::object>(slot(saved, slots.recipe));
    if (recipe.is_none()) return Tried::kDone;
    if (!of_class(recipe.ptr(), names.recipe)) return Tried::kLeftToPython;
    if (!unchanged(saved) || !alone(self, alias.ptr()) || !is_ready(self, recipe.ptr()))
      return Tried::kNotYet;
    if (slot(recipe.ptr(), slots.told) == Py_False) tell(self, recipe.ptr(), saved);
  }
  leave(self, saved, alias);
  return Tried::kDone;
}

// `Store.room_like`.
py::object room_like(const Position* self, const py::object& host) {
  const c10::Device device = reinterpret_cast<THPDevice*>(self->held.device)->device;
  if (device.is_cuda()) try {
      const Tensor& like = THPVariable_Unpack(host.ptr());
      const auto options = at::TensorOptions(device).dtype(like.dtype());
      return owned(THPVariable_Wrap(at::empty_strided(like.sizes(), like.strides(), options)));
    } catch (const c10::OutOfMemoryError&) {  // Python makes room
    }
  const auto taken = attribute(self->held.store, names.room_like);
  return ask(self, taken.ptr(), host.ptr());
}

// `Store.prefetch`.
void prefetch(const Position* self, PyObject* saved) {
  PyObject* transfer = slot(saved, slots.transfer);
  if (number_in(saved, slots.state) != kEvicted || transfer == Py_None ||
      slot(transfer, slots.host) == Py_None)
    return;
  const auto host = py::reinterpret_borrow<py::object>(slot(transfer, slots.host));
  const auto alias = room_like(self, host);
  const auto arrival = ask(self, of_backend(self, names.copy_in).ptr(), alias.ptr(), host.ptr());
  put(saved, slots.alias, alias.inc_ref().ptr());
  put(transfer, slots.arrival, arrival.inc_ref().ptr());
  put(saved, slots.state, PyLong_FromLongLong(kPrefetching));
  const auto counts = attribute(self->held.store, names.counts);
  const long long size_bytes = number_in(saved, slots.size_bytes);
  add(counts.ptr(), names.in_bytes, size_bytes);
  add(counts.ptr(), names.evicted_bytes, -size_bytes);
  hold(self, counts.ptr(), size_bytes);
}

// Waits for copies are timed.
bool times_waits(const Position* self) {
  return !attribute(self->held.store, names.waits).is_none();
}

// `Store._arrived`, of an ordinary tensor.
void arrive(const Position* self, PyObject* saved, const py::object& alias) {
  PyObject* const arguments[] = {alias.ptr(), slot(saved, slots.version)};
  put(saved, slots.key, arrived(nullptr, arguments, 2));
  put(saved, slots.alias, alias.inc_ref().ptr());
  const auto resident = attribute(self->held.store, names.resident);
  const auto itself = owned(PyWeakref_NewRef(saved, nullptr));
  if (PyDict_SetItem(resident.ptr(), slot(saved, slots.key), itself.ptr())) throw python_error();
  put(saved, slots.state, PyLong_FromLongLong(kResident));
  add(attribute(self->held.store, names.counts).ptr(), names.evicted, -1);
}

py::object made_again(const Position* self, PyObject* recipe);  // operator_calls.h

// `Store.fetch`, of what was prefetched, or leaves nothing on the host and has a recipe of its own.
void fetch(const Position* self, PyObject* saved) {
  PyObject* transfer = slot(saved, slots.transfer);
  if (number_in(saved, slots.state) == kPrefetching && !times_waits(self)) {
    const auto alias = py::reinterpret_borrow<py::object>(slot(saved, slots.alias));
    if (!ordinary(alias.ptr())) return;
    ask(self, of_backend(self, names.wait).ptr(), slot(transfer, slots.arrival));
    arrive(self, saved, alias);
  } else if (number_in(saved, slots.state) == kEvicted && transfer == Py_None &&
             of_class(slot(saved, slots.recipe), names.recipe)) {
    const auto recipe = py::reinterpret_borrow<py::object>(slot(saved, slots.recipe));
    auto alias = made_again(self, recipe.ptr());
    if (alias.is_none())
      alias = ask(self, attribute(self->held.store, names.recompute).ptr(), recipe.ptr());
    if (alias.is_none() || !ordinary(alias.ptr())) return;
    arrive(self, saved, alias);
    put(saved, slots.recipe, Py_NewRef(Py_None));
    const auto counts = attribute(self->held.store, names.counts);
    const long long size_bytes = number_in(saved, slots.size_bytes);
    add(counts.ptr(), names.recomputed, 1);
    add(counts.ptr(), names.evicted_bytes, -size_bytes);
    hold(self, counts.ptr(), size_bytes);
  }
}

void note_overdue(const Position* self, PyObject* number, PyObject* host) {
  if (PyDict_SetItem(self->held.overdue, number, host)) throw python_error();
}

void not_overdue(const Position* self, PyObject* number) {
  if (PyDict_Contains(self->held.overdue, number) && PyDict_DelItem(self->held.overdue, number))
    throw python_error();
}

// `DueMoves.catch_up`. False: Python has to see to some.
bool catch_up(const Position* self) {
  bool all = true;
  const auto items = owned(PyDict_Items(self->held.overdue));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.ptr()); i++) {
    PyObject* item = PyList_GET_ITEM(items.ptr(), i);
    PyObject *number = PyTuple_GET_ITEM(item, 0), *host = PyTuple_GET_ITEM(item, 1);
    const auto saved = followed(self, number);
    auto tried = PyLong_AsLongLong(number) < 0 ? Tried::kLeftToPython : Tried::kDone;
    if (tried == Tried::kDone && !saved.is_none() && host != Py_None)
      tried = offload(self, saved.ptr(), host);
    if (tried == Tried::kDone && !saved.is_none()) tried = evict(self, saved.ptr());
    all &= tried != Tried::kLeftToPython;
    if (tried == Tried::kDone && (saved.is_none() || !pending(saved.ptr())))
      not_overdue(self, number);
  }
  return all;
}

// `DueMoves.carry_out`. False: Python has to see to the rest. Nothing is loaded before all that is due
// has left: there is memory for it only then.
bool carry_out(const Position* self, const PlannedStep& step) {
  if (times_waits(self)) return false;
  const auto late = PyDict_GET_SIZE(self->held.overdue);
  if (step.offloads || step.prefetches || late)
    if (ask(self, of_backend(self, names.stream).ptr()).is_none()) return true;  // being captured
  bool all = !late || catch_up(self);
  const auto due = py::reinterpret_borrow<py::object>(self->held.due);
  const auto* next = reinterpret_cast<const long long*>(PyBytes_AS_STRING(due.ptr())) + step.due_begin;
  for (long long i = 0; i < step.offloads; i++) {
    const auto number = py::int_(*next++);
    const auto saved = followed(self, number.ptr());
    if (saved.is_none()) continue;
    PyObject* host = PyDict_GetItemWithError(self->held.hosts, number.ptr());
    const auto tried = host == nullptr ? Tried::kLeftToPython : offload(self, saved.ptr(), host);
    all &= tried != Tried::kLeftToPython;
    if (tried == Tried::kNotYet && pending(saved.ptr())) note_overdue(self, number.ptr(), host);
  }
  for (long long i = 0; i < step.evictions; i++) {
    const auto number = py::int_(*next++);
    if (PyDict_Contains(self->held.overdue, number.ptr())) continue;
    const auto saved = followed(self, number.ptr());
    const bool call = PyLong_AsLongLong(number.ptr()) < 0;
    const auto tried = call ? Tried::kLeftToPython
                       : saved.is_none() ? Tried::kDone
                                         : evict(self, saved.ptr());
    all &= tried != Tried::kLeftToPython;
    if (tried == Tried::kNotYet) note_overdue(self, number.ptr(), Py_None);
  }
  if (!all) return false;
  for (long long i = 0; i < step.prefetches; i++) {
    const auto number = py::int_(*next++);
    not_overdue(self, number.ptr());
    const auto saved = followed(self, number.ptr());
    if (!saved.is_none()) prefetch(self, saved.ptr());
  }
  return true;
}

}  // namespace
