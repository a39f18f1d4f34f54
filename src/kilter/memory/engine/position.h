// Where the present pass is in its plan, and what is saved and used by it. `position.py` says what
// it is for; copies, and everything that is not as planned, are left to Python.

#pragma once

#include <structmember.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>

#include "saved_tensors.h"

namespace {

std::atomic<bool> recording{false};  // operations of a call of a module are being recorded

// One event of a plan, as `packed_steps` of ready.py writes it.
struct PlannedStep {
  long long expected;
  long long code;
  long long kind;
  long long called, read;  // a call is recomputed that makes the tensor; it is read for recomputing
  long long version;
  long long moves;                     // Python has to see to what is due
  long long evict_begin, evict_count;  // tensors that leave for their recipes, in `evictions`
};
constexpr long long kKept = 0, kTaken = 1, kRecomputed = 2;

struct Position {
  PyObject_HEAD
  long long event;
  PyObject* within;     // weak reference to the present pass, or None
  PyObject* steps;      // bytes
  PyObject* evictions;  // bytes: numbers of tensors
  PyObject* overdue;    // dict: while something is in it, Python sees to each event
  PyObject* lent;       // list: while something is in it, all is left to Python
  PyObject* calls;      // `ModuleCalls`, or None
  PyObject* fence;      // of kilter, or None
  PyObject* device;
  size_t least_bytes;
  PyObject* store;
  PyObject* followed;  // dict: by number, weak references to the saved storages of the pass
  PyObject* read;      // gives the recipe of a tensor, or None
  PyObject* attend;    // issues what is due, and has a tensor there that backward needs
  long lone_users;     // the storage of a tensor that nobody else holds has so many users
  c10::StreamId stream;  // of the pass
};

Position* position_of(PyObject* object) { return reinterpret_cast<Position*>(object); }

PyObject* new_position(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *overdue, *lent, *fence, *device, *store, *followed, *read, *attend;
  Py_ssize_t least_bytes;
  long lone_users;
  if (!PyArg_ParseTuple(arguments, "O!O!OOnOO!OOl", &PyDict_Type, &overdue, &PyList_Type, &lent,
                        &fence, &device, &least_bytes, &store, &PyDict_Type, &followed, &read,
                        &attend, &lone_users))
    return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  Position* self = position_of(made);
  self->within = Py_NewRef(Py_None);
  self->calls = Py_NewRef(Py_None);
  self->steps = PyBytes_FromString("");
  self->evictions = PyBytes_FromString("");
  self->overdue = Py_NewRef(overdue);
  self->lent = Py_NewRef(lent);
  self->fence = Py_NewRef(fence);
  self->device = Py_NewRef(device);
  self->least_bytes = static_cast<size_t>(least_bytes);
  self->store = Py_NewRef(store);
  self->followed = Py_NewRef(followed);
  self->read = Py_NewRef(read);
  self->attend = Py_NewRef(attend);
  self->lone_users = lone_users;
  return made;
  END_HANDLE_TH_ERRORS
}

int visit_position(PyObject* object, visitproc visit, void* arg) {
  Position* self = position_of(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* held : {self->within, self->steps, self->overdue, self->lent, self->calls,
                         self->fence, self->store, self->followed, self->read, self->attend})
    Py_VISIT(held);
  return 0;
}

int clear_position(PyObject* object) {
  Position* self = position_of(object);
  for (PyObject** held :
       {&self->within, &self->steps, &self->evictions, &self->overdue, &self->lent, &self->calls,
        &self->fence, &self->device, &self->store, &self->followed, &self->read, &self->attend})
    Py_CLEAR(*held);
  return 0;
}

void free_position(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear_position(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// Where operations are issued to now.
c10::StreamId present_stream(const Position* self) {
  const c10::Device device = reinterpret_cast<THPDevice*>(self->device)->device;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// `Position.follow`: the steps, a weak reference to the pass, and what watches calls of modules.
PyObject* follow(PyObject* object, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Position* self = position_of(object);
  if (self->event == 0) self->stream = present_stream(self);  // a pass begins
  Py_XSETREF(self->steps, Py_NewRef(PyTuple_GET_ITEM(arguments[0], 0)));
  Py_XSETREF(self->evictions, Py_NewRef(PyTuple_GET_ITEM(arguments[0], 1)));
  Py_XSETREF(self->within, Py_NewRef(arguments[1]));
  Py_XSETREF(self->calls, Py_NewRef(arguments[2]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The step of the present event if it is this one, and the plan holds.
const PlannedStep* planned_step(const Position* self, long long code) {
  const auto count = PyBytes_GET_SIZE(self->steps) / static_cast<Py_ssize_t>(sizeof(PlannedStep));
  if (self->event >= count || PyList_GET_SIZE(self->lent)) return nullptr;
  const auto* steps = reinterpret_cast<const PlannedStep*>(PyBytes_AS_STRING(self->steps));
  const PlannedStep& step = steps[self->event];
  if (step.expected != code) return nullptr;
  if (self->fence != Py_None) {
    const auto down = owned(PyObject_GetAttr(self->fence, names.down));
    if (down.ptr() != Py_False) return nullptr;
  }
  return &step;
}

// Something leaves or comes back at this step.
bool busy(const Position* self, const PlannedStep& step) {
  return step.moves || step.evict_count || PyDict_GET_SIZE(self->overdue);
}

// The event has been counted: Python sees to it, behind the fence.
void attend(Position* self, PyObject* saved) {
  owned(PyObject_CallOneArg(self->attend, saved));
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

// `SavedBytes.hold` of saved_bytes.py, for devices that measure what is held themselves.
void hold(PyObject* counts, long long change_bytes) {
  const long long held_bytes = integer(counts, names.held_bytes) + change_bytes;
  set_attribute(counts, names.held_bytes, held_bytes);
  const long long all_bytes = held_bytes + integer(counts, names.beside_bytes);
  for (PyObject* peak_bytes : {names.segment_peak_bytes, names.held_peak_bytes}) {
    if (all_bytes <= integer(counts, peak_bytes)) return;
    set_attribute(counts, peak_bytes, all_bytes);
  }
}

// `Store.mark` of store.py.
void mark(PyObject* view, PyObject* saved, PyObject* object) {
  const Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.grad_fn() && tensor.output_nr() == 0) {
    const auto metadata = attribute(attribute(object, names.grad_fn).ptr(), names.metadata);
    const auto layout = owned(PyTuple_GetSlice(view, 1, PyTuple_GET_SIZE(view)));
    const auto output = py::make_tuple(owned(PyWeakref_NewRef(saved, nullptr)), layout);
    if (PyObject_SetItem(metadata.ptr(), names.output, output.ptr())) throw python_error();
  }
  put(saved, slots.cast, is_cast_of_parameter(nullptr, object));
}

// What autograd is given for a tensor on a saved storage.
py::object view_on(PyObject* saved, PyObject* tensor) {
  PyObject* asked[] = {saved, slot(saved, slots.alias), slot(saved, slots.plain), tensor};
  return owned(view(nullptr, asked, 4));
}

// The recipe of a tensor, or None. Nothing: an error of ours, for the fence; Python tries again.
py::object recipe_of(const Position* self, PyObject* tensor) {
  PyObject* found = PyObject_CallOneArg(self->read, tensor);
  if (found != nullptr) return py::reinterpret_steal<py::object>(found);
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();
  PyErr_Clear();
  return {};
}

// What `Swapper._save` of engine.py does where nothing is copied: gives what autograd is given.
// None: another case.
py::object take_over(Position* self, const PlannedStep step, PyObject* object, PyObject* within,
                     PyObject* size_bytes, PyObject* key) {
  const auto number = py::int_((-1 - step.code) / 2);
  const auto resident = attribute(self->store, names.resident);
  PyObject* known = PyDict_GetItemWithError(self->followed, number.ptr());
  PyObject* there = PyDict_GetItemWithError(resident.ptr(), key);
  if (known != there) return py::none();
  if (known != nullptr) {  // saved once more
    const auto saved = referred_to(known);
    const auto version = THPVariable_Unpack(object)._version();
    const bool unchanged = !saved.is_none() && slot(saved.ptr(), slots.within) == within &&
                           number_in(saved.ptr(), slots.version) == version;
    return unchanged ? view_on(saved.ptr(), object) : py::none();
  }
  const auto touched = attribute(self->store, names.touched);
  if (PyDict_GET_SIZE(touched.ptr()) && PyDict_Contains(touched.ptr(), key)) return py::none();
  const bool as_tried = THPVariable_Unpack(object)._version() == step.version;
  py::object recipe = py::none();
  if (step.kind == kRecomputed && as_tried) recipe = recipe_of(self, object);
  if (!recipe) return py::none();
  const auto alias = owned(held(nullptr, object));
  if (alias.is_none()) return py::none();
  const auto made = saved_storage(within, number.ptr(), size_bytes, key, alias.ptr());
  PyObject* saved = made.ptr();
  const auto reference = owned(PyWeakref_NewRef(saved, nullptr));
  PyObject* itself = reference.ptr();
  if (PyDict_SetItem(resident.ptr(), key, itself) ||
      PyDict_SetItem(self->followed, number.ptr(), itself))
    throw python_error();
  const auto counts = attribute(self->store, names.counts);
  hold(counts.ptr(), step.expected);
  set_attribute(counts.ptr(), names.alive, integer(counts.ptr(), names.alive) + 1);
  put(saved, slots.store, Py_NewRef(self->store));
  if (step.called && self->calls != Py_None) {
    const auto call = attribute(self->calls, names.present);
    if (!call.is_none()) {
      if (PyList_Append(attribute(call.ptr(), names.members).ptr(), itself)) throw python_error();
      put(saved, slots.recipe, Py_NewRef(call.ptr()));
    }
  }
  auto given = view_on(saved, object);
  if (step.read && as_tried) mark(given.ptr(), saved, object);
  if (!recipe.is_none()) put(saved, slots.recipe, recipe.release().ptr());
  return given;
}

// `Saved.closed` and `Saved.unchanged` of store.py.
bool closed(const Position* self, PyObject* saved) {
  PyObject* alias = slot(saved, slots.alias);
  if (alias == Py_None || number_in(saved, slots.state) != kResident) return true;
  PyObject* transfer = slot(saved, slots.transfer);
  const bool copied = transfer != Py_None && slot(transfer, slots.departure) != Py_None;
  if (copied && slot(saved, slots.handed_out) == Py_False) return true;
  return ordinary(alias) && alone(alias, self->lone_users);
}

bool unchanged(PyObject* saved) {
  PyObject* alias = slot(saved, slots.alias);
  return slot(saved, slots.touched) == Py_False &&
         (alias == Py_None ||
          THPVariable_Unpack(alias)._version() == number_in(saved, slots.version));
}

// `Recipe.ready` of recompute.py, of one that reads saved tensors and copies only.
bool is_ready(const Position* self, PyObject* recipe) {
  PyObject* parameters = slot(recipe, slots.parameters);
  if (PyTuple_GET_SIZE(parameters) || slot(recipe, slots.in_backward) != Py_False) return false;
  PyObject* sources = slot(recipe, slots.closed);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); i++)
    if (!closed(self, PyTuple_GET_ITEM(sources, i))) return false;
  sources = slot(recipe, slots.sources);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); i++)
    if (!unchanged(PyTuple_GET_ITEM(sources, i))) return false;
  return true;
}

// Whoever changes what a recipe reads has the tensor recomputed before.
void tell(PyObject* store, PyObject* recipe, PyObject* reference) {
  const auto dependents = attribute(store, names.dependents);
  PyObject* sources = slot(recipe, slots.sources);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); i++) {
    const auto source = owned(PyLong_FromVoidPtr(PyTuple_GET_ITEM(sources, i)));
    const auto none = owned(PyList_New(0));
    PyObject* known = PyDict_SetDefault(dependents.ptr(), source.ptr(), none.ptr());
    if (known == nullptr || PyList_Append(known, reference)) throw python_error();
  }
  put(recipe, slots.told, Py_NewRef(Py_True));
}

// `Store.evict` of store.py, of a tensor that a recipe of its own makes. False: another case.
bool give_up(Position* self, PyObject* saved, PyObject* reference) {
  const auto alias = py::reinterpret_borrow<py::object>(slot(saved, slots.alias));
  if (alias.is_none() || number_in(saved, slots.state) != kResident) return true;
  if (slot(saved, slots.handed_out) != Py_False) return true;
  const auto recipe = py::reinterpret_borrow<py::object>(slot(saved, slots.recipe));
  if (slot(saved, slots.transfer) != Py_None || !of_class(recipe.ptr(), names.recipe) ||
      !ordinary(alias.ptr()) || !unchanged(saved) || !alone(alias.ptr(), self->lone_users) ||
      !is_ready(self, recipe.ptr()))
    return false;
  if (slot(recipe.ptr(), slots.told) == Py_False) tell(self->store, recipe.ptr(), reference);
  put(saved, slots.state, PyLong_FromLongLong(kEvicted));
  put(saved, slots.alias, Py_NewRef(Py_None));
  const auto resident = attribute(self->store, names.resident);
  PyObject* key = slot(saved, slots.key);
  if (PyDict_Contains(resident.ptr(), key) && PyDict_DelItem(resident.ptr(), key))
    throw python_error();
  const auto counts = attribute(self->store, names.counts);
  const long long size_bytes = number_in(saved, slots.size_bytes);
  const auto add = [&](PyObject* name, long long more) {
    set_attribute(counts.ptr(), name, integer(counts.ptr(), name) + more);
  };
  add(names.evicted, 1);
  add(names.evicted_bytes, size_bytes);
  hold(counts.ptr(), -size_bytes);
  const auto backend = attribute(self->store, names.backend);
  if (attribute(backend.ptr(), names.spoils).ptr() == Py_True) {
    const auto storage = owned(PyObject_CallMethodNoArgs(alias.ptr(), names.untyped_storage));
    owned(PyObject_CallMethodOneArg(backend.ptr(), names.evicted, storage.ptr()));
  }
  return true;
}

// `DueMoves.carry_out` of pass_under_plan.py, where tensors leave for their recipes. False: another case.
bool evict(Position* self, const PlannedStep& step) {
  if (step.evict_count == 0) return true;
  if (recording) return false;
  const auto evictions = py::reinterpret_borrow<py::object>(self->evictions);
  const auto* numbers = reinterpret_cast<const long long*>(PyBytes_AS_STRING(evictions.ptr()));
  for (long long i = 0; i < step.evict_count; i++) {
    const auto number = py::int_(numbers[step.evict_begin + i]);
    PyObject* found = PyDict_GetItemWithError(self->followed, number.ptr());
    if (found == nullptr) continue;
    const auto reference = py::reinterpret_borrow<py::object>(found);
    const auto saved = referred_to(found);
    if (!saved.is_none() && !give_up(self, saved.ptr(), reference.ptr())) return false;
  }
  return true;
}

// `Position.save`.
PyObject* save(PyObject* object, PyObject* tensor) {
  HANDLE_TH_ERRORS
  Position* self = position_of(object);
  size_t size_bytes = 0;
  auto packed = owned(pack(tensor, self->device, self->least_bytes, size_bytes));
  const auto within = referred_to(self->within);
  const PlannedStep* step =
      size_bytes == 0 ? nullptr : planned_step(self, static_cast<long long>(size_bytes));
  if (step == nullptr || within.is_none() || present_stream(self) != self->stream)
    return packed.release().ptr();
  const PlannedStep now = *step;
  if (recording && (now.kind == kRecomputed || busy(self, now))) return packed.release().ptr();
  const bool left = evict(self, now);
  py::object given = py::none();
  if (now.kind == kKept) {
    const Tensor& unpacked = THPVariable_Unpack(tensor);
    given = owned(keep(tensor, unpacked, base_of(unpacked), py::int_(now.code), py::handle(within)));
  } else {
    given = take_over(self, now, tensor, within.ptr(), PyTuple_GET_ITEM(packed.ptr(), 0),
                      PyTuple_GET_ITEM(packed.ptr(), 1));
  }
  if (given.is_none()) return packed.release().ptr();
  self->event++;
  if (!left || now.moves || PyDict_GET_SIZE(self->overdue)) attend(self, Py_None);
  return given.release().ptr();
  END_HANDLE_TH_ERRORS
}

// What was not followed.
PyObject* use_kept(Position* self, PyObject* packed) {
  PyObject* tensor = PyTuple_GET_ITEM(packed, 0);
  if (!ordinary(tensor) ||
      THPVariable_Unpack(tensor)._version() != PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1)))
    Py_RETURN_NONE;
  if (PyTuple_GET_SIZE(packed) == 5) {
    const long long code = PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 3));
    if (PyTuple_GET_ITEM(packed, 4) != referred_to(self->within).ptr()) Py_RETURN_NONE;
    const PlannedStep* step = planned_step(self, code);
    if (step == nullptr || (recording && busy(self, *step))) Py_RETURN_NONE;
    const PlannedStep now = *step;
    self->event++;
    if (!evict(self, now) || now.moves || PyDict_GET_SIZE(self->overdue)) attend(self, Py_None);
  }
  return Py_NewRef(tensor);
}

// A followed tensor: `Store.hand_out` of store.py.
PyObject* use_view(Position* self, PyObject* view) {
  PyObject* saved = PyTuple_GET_ITEM(view, 0);
  if (!of_class(saved, names.saved) ||
      slot(saved, slots.within) != referred_to(self->within).ptr() ||
      torch::autograd::get_current_graph_task_keep_graph())
    Py_RETURN_NONE;
  const auto as_saved = [saved] {
    PyObject* alias = slot(saved, slots.alias);
    return ordinary(alias) &&
           THPVariable_Unpack(alias)._version() == number_in(saved, slots.version);
  };
  const bool there = number_in(saved, slots.state) == kResident;
  const PlannedStep* step = planned_step(self, -1 - 2 * number_in(saved, slots.number));
  if (step == nullptr || (there && !as_saved()) || (recording && (!there || busy(self, *step))))
    Py_RETURN_NONE;
  const PlannedStep now = *step;
  self->event++;
  if (!evict(self, now) || now.moves || PyDict_GET_SIZE(self->overdue) || !there) {
    attend(self, saved);
    if (number_in(saved, slots.state) != kResident || !as_saved()) Py_RETURN_NONE;
  }
  put(saved, slots.handed_out, Py_NewRef(Py_True));
  PyObject* alias = slot(saved, slots.alias);
  if (PyTuple_GET_ITEM(view, 3) == Py_None) return Py_NewRef(alias);
  const Tensor& tensor = THPVariable_Unpack(alias);
  const auto dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(view, 2))->scalar_type;
  const auto [size, stride, offset] = std::tuple(
      PyTuple_GET_ITEM(view, 3), PyTuple_GET_ITEM(view, 4), PyTuple_GET_ITEM(view, 5));
  if (tensor.scalar_type() == dtype) return laid_out(tensor, size, stride, offset);
  return as_another(tensor, dtype, size, stride, offset);
}

// `Position.use`.
PyObject* use(PyObject* object, PyObject* packed) {
  HANDLE_TH_ERRORS
  if (under_a_mode()) Py_RETURN_NONE;
  if (PyTuple_CheckExact(packed)) return use_kept(position_of(object), packed);
  if (of_class(packed, names.view)) return use_view(position_of(object), packed);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef position_methods[] = {
    {"follow", plain_function(follow), METH_FASTCALL, nullptr},
    {"save", save, METH_O, nullptr},
    {"use", use, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef position_members[] = {
    {"event", T_LONGLONG, offsetof(Position, event), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot position_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_position)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_position)},
    {Py_tp_traverse, reinterpret_cast<void*>(visit_position)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_position)},
    {Py_tp_methods, position_methods},
    {Py_tp_members, position_members},
    {0, nullptr},
};

PyType_Spec position_type = {"kilter_recorder.Position", sizeof(Position), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, position_slots};

}  // namespace
