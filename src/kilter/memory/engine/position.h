// Where the present pass is in its plan, and what is saved and used by it. `position.py` says what
// it is for; everything that is not as planned is left to Python.

#pragma once

#include <structmember.h>

#include "resolved.h"

namespace {

Position* position_of(PyObject* object) { return reinterpret_cast<Position*>(object); }

PyObject* new_position(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* given[kHooks];
  if (!PyArg_ParseTuple(arguments, "OO!O!O!OO", &given[0], &PyDict_Type, &given[1], &PyList_Type,
                        &given[2], &PyDict_Type, &given[3], &given[4], &given[5]))
    return nullptr;
  const auto made = owned(type->tp_alloc(type, 0));
  Position* self = position_of(made.ptr());
  for (Py_ssize_t i = 0; i < kReferences; i++)
    held_by(self, i) = Py_NewRef(i < kHooks ? given[i] : Py_None);
  const py::handle hooks = given[0];
  Py_SETREF(self->held.fence, py::object(hooks.attr("fence")).release().ptr());
  Py_SETREF(self->held.device, py::object(hooks.attr("device")).release().ptr());
  Py_SETREF(self->held.store, py::object(hooks.attr("store")).release().ptr());
  Py_SETREF(self->held.steps, PyBytes_FromString(""));
  self->least_bytes = hooks.attr("min_bytes").cast<size_t>();
  self->lone_users = hooks.attr("store").attr("lone_users").cast<long>();
  return Py_NewRef(made.ptr());
  END_HANDLE_TH_ERRORS
}

int visit_position(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  for (Py_ssize_t i = 0; i < kReferences; i++) Py_VISIT(held_by(position_of(object), i));
  return 0;
}

int clear_position(PyObject* object) {
  for (Py_ssize_t i = 0; i < kReferences; i++) Py_CLEAR(held_by(position_of(object), i));
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
  const c10::Device device = reinterpret_cast<THPDevice*>(self->held.device)->device;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

// `Position.follow`: the steps and what is due at them, host memory, resolved recipes, a weak
// reference to the pass, and what watches calls of modules.
PyObject* follow(PyObject* object, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Position* self = position_of(object);
  if (self->event == 0) self->stream = present_stream(self);  // a pass begins
  PyObject* const given[] = {PyTuple_GET_ITEM(arguments[0], 0), PyTuple_GET_ITEM(arguments[0], 1),
                             arguments[1], arguments[2], arguments[3], arguments[4]};
  for (Py_ssize_t i = kGiven; i < kReferences; i++)
    Py_XSETREF(held_by(self, i), Py_NewRef(given[i - kGiven]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The step of the present event if it is this one, and the plan holds.
const PlannedStep* planned_step(const Position* self, long long code) {
  const auto& held = self->held;
  const auto count = PyBytes_GET_SIZE(held.steps) / static_cast<Py_ssize_t>(sizeof(PlannedStep));
  if (self->event >= count || PyList_GET_SIZE(held.lent)) return nullptr;
  const auto* steps = reinterpret_cast<const PlannedStep*>(PyBytes_AS_STRING(held.steps));
  const PlannedStep& step = steps[self->event];
  if (step.expected != code) return nullptr;
  if (held.fence != Py_None && attribute(held.fence, names.down).ptr() != Py_False) return nullptr;
  return &step;
}

// Something leaves or comes back at this step.
bool busy(const Position* self, const PlannedStep& step) {
  return step.offloads || step.evictions || step.prefetches || PyDict_GET_SIZE(self->held.overdue);
}

// The event has been counted: carry out what is due, and have a tensor there that backward needs.
void see_to(const Position* self, const PlannedStep& step, PyObject* saved) {
  try {
    const bool done = !busy(self, step) || carry_out(self, step);
    if (saved != Py_None) fetch(self, saved);
    if (!done || (saved != Py_None && number_in(saved, slots.state) != kResident))
      ask(self, self->held.attend, done ? Py_False : Py_True, saved);
  } catch (const Aside&) {
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

// `Store.mark_written`.
void mark_written(PyObject* object) {
  const auto base = base_of(THPVariable_Unpack(object));
  for (PyObject* made : {object, base.ptr()}) {
    const auto node = made == nullptr ? py::object(py::none()) : attribute(made, names.grad_fn);
    if (!node.is_none() &&
        PyObject_SetItem(attribute(node.ptr(), names.metadata).ptr(), names.written, Py_True))
      throw python_error();
  }
}

// What autograd is given for a tensor on a saved storage.
py::object view_on(PyObject* saved, PyObject* tensor) {
  PyObject* asked[] = {saved, slot(saved, slots.alias), slot(saved, slots.plain), tensor};
  return owned(view(nullptr, asked, 4));
}

// The recipe of the tensor with this number: as it was resolved, or read by Python; or None.
py::object recipe_of(const Position* self, PyObject* number, PyObject* tensor) {
  PyObject* known = PyDict_GetItemWithError(self->held.recipes, number);
  if (known != nullptr) {
    const auto held = py::reinterpret_borrow<py::object>(known);
    const auto found = held.cast<const ResolvedRecipe&>().read(self, tensor);
    if (!found.is_none()) return found;
  }
  return ask(self, self->held.read, tensor);
}

// What `PassUnderPlan.save` does: gives what autograd is given. None: another case.
py::object take_over(Position* self, const PlannedStep step, PyObject* object, PyObject* within,
                     PyObject* size_bytes, PyObject* key) {
  const auto number = py::int_((-1 - step.code) / 2);
  const auto resident = attribute(self->held.store, names.resident);
  PyObject* known = PyDict_GetItemWithError(self->held.followed, number.ptr());
  PyObject* there = PyDict_GetItemWithError(resident.ptr(), key);
  if (known != there) return py::none();
  if (known != nullptr) {  // saved once more
    const auto saved = referred_to(known);
    const auto version = THPVariable_Unpack(object)._version();
    const bool unchanged = !saved.is_none() && slot(saved.ptr(), slots.within) == within &&
                           number_in(saved.ptr(), slots.version) == version;
    return unchanged ? view_on(saved.ptr(), object) : py::none();
  }
  const auto touched = attribute(self->held.store, names.touched);
  if (PyDict_GET_SIZE(touched.ptr()) && PyDict_Contains(touched.ptr(), key)) return py::none();
  const bool as_tried = THPVariable_Unpack(object)._version() == step.version;
  py::object recipe = py::none();
  if (step.kind == kRecomputed && as_tried) recipe = recipe_of(self, number.ptr(), object);
  const auto alias = owned(held(nullptr, object));
  if (alias.is_none()) return py::none();
  const auto made = saved_storage(within, number.ptr(), size_bytes, key, alias.ptr());
  PyObject* saved = made.ptr();
  const auto reference = owned(PyWeakref_NewRef(saved, nullptr));
  PyObject* itself = reference.ptr();
  if (PyDict_SetItem(resident.ptr(), key, itself) ||
      PyDict_SetItem(self->held.followed, number.ptr(), itself))
    throw python_error();
  const auto counts = attribute(self->held.store, names.counts);
  hold(self, counts.ptr(), step.expected);
  set_attribute(counts.ptr(), names.alive, integer(counts.ptr(), names.alive) + 1);
  put(saved, slots.store, Py_NewRef(self->held.store));
  if (step.called && self->held.calls != Py_None) {
    const auto call = attribute(self->held.calls, names.present);
    if (!call.is_none()) {
      if (PyList_Append(attribute(call.ptr(), names.members).ptr(), itself)) throw python_error();
      put(saved, slots.recipe, Py_NewRef(call.ptr()));
    }
  }
  auto given = view_on(saved, object);
  if (!as_tried)
    mark_written(object);
  else if (step.read)
    mark(given.ptr(), saved, object);
  if (!recipe.is_none()) put(saved, slots.recipe, recipe.release().ptr());
  return given;
}

// `Position.save`.
PyObject* save(PyObject* object, PyObject* tensor) {
  HANDLE_TH_ERRORS
  Position* self = position_of(object);
  size_t size_bytes = 0;
  auto packed = owned(pack(tensor, self->held.device, self->least_bytes, size_bytes));
  const auto within = referred_to(self->held.within);
  const PlannedStep* step =
      size_bytes == 0 ? nullptr : planned_step(self, static_cast<long long>(size_bytes));
  if (step == nullptr || within.is_none() || present_stream(self) != self->stream)
    return packed.release().ptr();
  const PlannedStep now = *step;
  if (recording && (now.kind == kRecomputed || busy(self, now))) return packed.release().ptr();
  py::object given = py::none();
  if (now.kind == kKept) {
    const Tensor& unpacked = THPVariable_Unpack(tensor);
    given = owned(keep(tensor, unpacked, base_of(unpacked), py::int_(now.code), py::handle(within)));
  } else {
    try {
      given = take_over(self, now, tensor, within.ptr(), PyTuple_GET_ITEM(packed.ptr(), 0),
                        PyTuple_GET_ITEM(packed.ptr(), 1));
    } catch (const Aside&) {  // Python has autograd keep it
    }
  }
  if (given.is_none()) return packed.release().ptr();
  self->event++;
  see_to(self, now, Py_None);
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
    if (PyTuple_GET_ITEM(packed, 4) != referred_to(self->held.within).ptr()) Py_RETURN_NONE;
    const PlannedStep* step = planned_step(self, code);
    if (step == nullptr || (recording && busy(self, *step))) Py_RETURN_NONE;
    const PlannedStep now = *step;
    self->event++;
    see_to(self, now, Py_None);
  }
  return Py_NewRef(tensor);
}

// A followed tensor: `Store.hand_out` of store.py.
PyObject* use_view(Position* self, PyObject* view) {
  PyObject* saved = PyTuple_GET_ITEM(view, 0);
  if (!of_class(saved, names.saved) ||
      slot(saved, slots.within) != referred_to(self->held.within).ptr() ||
      torch::autograd::get_current_graph_task_keep_graph())
    Py_RETURN_NONE;
  const auto good = [saved] {
    PyObject* alias = slot(saved, slots.alias);
    return ordinary(alias) && as_saved(saved, alias);
  };
  const bool there = number_in(saved, slots.state) == kResident;
  const PlannedStep* step = planned_step(self, -1 - 2 * number_in(saved, slots.number));
  if (step == nullptr || (there && !good()) || (recording && (!there || busy(self, *step))))
    Py_RETURN_NONE;
  const PlannedStep now = *step;
  self->event++;
  see_to(self, now, saved);
  if (number_in(saved, slots.state) != kResident || !good()) Py_RETURN_NONE;
  put(saved, slots.handed_out, Py_NewRef(Py_True));
  PyObject* alias = slot(saved, slots.alias);
  return THPVariable_Wrap(tensor_on(THPVariable_Unpack(alias), view));
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

PyObject* save_unrecorded(PyObject* object, PyObject* tensor) {
  const Unrecorded now;
  return save(object, tensor);
}

// `TensorHooks._pack`.
PyObject* pack(PyObject* object, PyObject* tensor) {
  PyObject* hooks = position_of(object)->held.hooks;
  PyObject* packed = recording ? save_unrecorded(object, tensor) : save(object, tensor);
  const auto size = packed != nullptr && PyTuple_CheckExact(packed) ? PyTuple_GET_SIZE(packed) : 0;
  if (packed != Py_None && size != 2) {
    const bool noted = size != 3 || kept_meanwhile == nullptr;
    if (noted || PyList_Append(kept_meanwhile, packed) == 0) return packed;
    Py_DECREF(packed);
    return nullptr;
  }
  PyObject* all[] = {hooks, tensor, packed};
  PyObject* found =
      recording ? PyObject_VectorcallMethod(names.pack, all, 2, nullptr)
                : PyObject_VectorcallMethod(names.pack_any, all, std::size(all), nullptr);
  Py_DECREF(packed);
  return found;
}

// `TensorHooks._unpack`.
PyObject* unpack(PyObject* object, PyObject* packed) {
  PyObject* found = use(object, packed);
  if (found != Py_None) return found;
  Py_DECREF(found);
  PyObject* hooks = position_of(object)->held.hooks;
  return PyObject_CallMethodOneArg(hooks, names.unpack_otherwise, packed);
}

PyMethodDef position_methods[] = {
    {"follow", plain_function(follow), METH_FASTCALL, nullptr},
    {"save", save, METH_O, nullptr},
    {"use", use, METH_O, nullptr},
    {"pack", pack, METH_O, nullptr},
    {"unpack", unpack, METH_O, nullptr},
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
