// Where the present pass is in its plan, and the events at which nothing is to be done but to hand a
// tensor on. `position.py` says what it is for; everything else is left to Python.

#pragma once

#include <structmember.h>

#include <torch/csrc/autograd/graph_task.h>

#include "saved_tensors.h"

namespace {

// One event of a plan, as `packed_steps` of position.py writes it.
struct PlannedStep {
  long long expected;
  long long code;
  long long kind;
};
constexpr long long kMoves = 0, kKept = 2;  // 1: nothing moves, and the engine follows the tensor

struct Position {
  PyObject_HEAD
  long long event;
  PyObject* within;   // weak reference to the present pass, or None
  PyObject* steps;    // bytes
  PyObject* waiting;  // tuple: while something is in one of its members, no event is quiet
  PyObject* fence;    // of kilter, or None
  PyObject* device;
  size_t least_bytes;
};

Position* position_of(PyObject* object) { return reinterpret_cast<Position*>(object); }

PyObject* new_position(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *waiting, *fence, *device;
  Py_ssize_t least_bytes;
  if (!PyArg_ParseTuple(arguments, "O!OOn", &PyTuple_Type, &waiting, &fence, &device, &least_bytes))
    return nullptr;
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  Position* self = position_of(made);
  self->within = Py_NewRef(Py_None);
  self->steps = PyBytes_FromString("");
  self->waiting = Py_NewRef(waiting);
  self->fence = Py_NewRef(fence);
  self->device = Py_NewRef(device);
  self->least_bytes = static_cast<size_t>(least_bytes);
  return made;
  END_HANDLE_TH_ERRORS
}

int visit_position(PyObject* object, visitproc visit, void* arg) {
  Position* self = position_of(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* held : {self->within, self->steps, self->waiting, self->fence})
    Py_VISIT(held);
  return 0;
}

int clear_position(PyObject* object) {
  Position* self = position_of(object);
  for (PyObject** held :
       {&self->within, &self->steps, &self->waiting, &self->fence, &self->device})
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

// `Position.follow`: the steps, and a weak reference to the pass.
PyObject* follow(PyObject* object, PyObject* const* arguments, Py_ssize_t) {
  Position* self = position_of(object);
  Py_XSETREF(self->steps, Py_NewRef(arguments[0]));
  Py_XSETREF(self->within, Py_NewRef(arguments[1]));
  Py_RETURN_NONE;
}

// The step of the present event if it is this one and nothing moves at it.
const PlannedStep* quiet_step(const Position* self, long long code) {
  const auto count = PyBytes_GET_SIZE(self->steps) / static_cast<Py_ssize_t>(sizeof(PlannedStep));
  if (self->event >= count) return nullptr;
  const auto* steps = reinterpret_cast<const PlannedStep*>(PyBytes_AS_STRING(self->steps));
  const PlannedStep& step = steps[self->event];
  if (step.kind == kMoves || step.expected != code) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->waiting); i++)
    if (PyObject_Size(PyTuple_GET_ITEM(self->waiting, i))) return nullptr;
  if (self->fence != Py_None) {
    const auto down = py::reinterpret_steal<py::object>(PyObject_GetAttr(self->fence, names.down));
    if (!down) throw python_error();
    if (down.ptr() != Py_False) return nullptr;
  }
  return &step;
}

// The present pass, or None.
PyObject* pass_of(const Position* self) {
  return self->within == Py_None ? Py_None : PyWeakref_GetObject(self->within);
}

// `Position.save`.
PyObject* save(PyObject* object, PyObject* tensor) {
  HANDLE_TH_ERRORS
  Position* self = position_of(object);
  size_t size_bytes = 0;
  PyObject* packed = pack(tensor, self->device, self->least_bytes, size_bytes);
  if (size_bytes == 0) return packed;
  PyObject* within = pass_of(self);
  const PlannedStep* step = quiet_step(self, static_cast<long long>(size_bytes));
  if (step == nullptr || step->kind != kKept || within == Py_None) return packed;
  Py_DECREF(packed);
  const Tensor& unpacked = THPVariable_Unpack(tensor);
  packed = keep(tensor, unpacked, base_of(unpacked), py::int_(step->code), py::handle(within));
  self->event++;
  return packed;
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
    if (PyTuple_GET_ITEM(packed, 4) != pass_of(self) || quiet_step(self, code) == nullptr)
      Py_RETURN_NONE;
    self->event++;
  }
  return Py_NewRef(tensor);
}

py::object attribute(PyObject* object, PyObject* name) {
  auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
  if (!found) throw python_error();
  return found;
}

long long integer(PyObject* object, PyObject* name) {
  return PyLong_AsLongLong(attribute(object, name).ptr());
}

// A followed tensor that is resident: `Store.hand_out` of store.py.
PyObject* use_view(Position* self, PyObject* view) {
  PyObject* saved = PyTuple_GET_ITEM(view, 0);
  if (attribute(saved, names.within).ptr() != pass_of(self) ||
      integer(saved, names.state) != kResident ||
      torch::autograd::get_current_graph_task_keep_graph())
    Py_RETURN_NONE;
  const auto alias = attribute(saved, names.alias);
  if (!ordinary(alias.ptr())) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(alias.ptr());
  const bool alike = PyTuple_GET_ITEM(view, 3) == Py_None;
  const auto dtype = attribute(alias.ptr(), names.dtype);
  if ((!alike && dtype.ptr() != PyTuple_GET_ITEM(view, 2)) ||
      tensor._version() != integer(saved, names.version) ||
      quiet_step(self, -1 - 2 * integer(saved, names.number)) == nullptr)
    Py_RETURN_NONE;
  if (PyObject_SetAttr(saved, names.handed_out, Py_True)) throw python_error();
  self->event++;
  if (alike) return Py_NewRef(alias.ptr());
  return laid_out(tensor, PyTuple_GET_ITEM(view, 3), PyTuple_GET_ITEM(view, 4),
                  PyTuple_GET_ITEM(view, 5));
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
