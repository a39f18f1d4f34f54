// The copies of small parameters at the beginning of a pass: `_copies_of` of small_copies.py.

#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include <map>

#include "saved_tensors.h"

namespace {

// `_room_for`: memory of the copy before, which only its `_Copy` holds, or new memory.
py::object room_for(const Tensor& parameter, at::ScalarType dtype, PyObject* before) {
  PyObject* copy = before == nullptr ? Py_None : PyTuple_GET_ITEM(before, 0);
  if (Py_REFCNT(copy) == 1 && ordinary(copy)) {
    const Tensor& tensor = THPVariable_Unpack(copy);
    if (tensor.sizes() == parameter.sizes() && tensor.scalar_type() == dtype &&
        tensor.device() == parameter.device())
      return py::reinterpret_borrow<py::object>(copy);
  }
  return owned(THPVariable_Wrap(at::empty(parameter.sizes(), parameter.options().dtype(dtype))));
}

// What is wanted, the copies of the pass before, `_Copy`, and the device. None: left to Python.
PyObject* copies_of(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard ungraded;
  const auto device = reinterpret_cast<THPDevice*>(arguments[3])->device;
  std::map<std::pair<at::ScalarType, at::ScalarType>, std::pair<std::vector<Tensor>, std::vector<Tensor>>>
      by_type;
  const auto found = owned(PyDict_New());
  PyObject *key, *wanted;
  Py_ssize_t at = 0;
  while (PyDict_Next(arguments[0], &at, &key, &wanted)) {
    PyObject* object = PyTuple_GET_ITEM(wanted, 0);
    if (!ordinary(object)) Py_RETURN_NONE;
    const Tensor& parameter = THPVariable_Unpack(object);
    if (parameter.device() != device || !parameter.is_contiguous() || !parameter.storage().nbytes())
      continue;
    PyObject* as = PyTuple_GET_ITEM(key, 1);
    const auto dtype = as == Py_None ? parameter.scalar_type()
                                     : reinterpret_cast<THPDtype*>(as)->scalar_type;
    const auto copy = room_for(parameter, dtype, PyDict_GetItemWithError(arguments[1], key));
    auto& [copies, parameters] = by_type[{parameter.scalar_type(), dtype}];
    copies.push_back(THPVariable_Unpack(copy.ptr()));
    parameters.push_back(parameter);
    const auto made = py::reinterpret_steal<py::object>(tuple_of(
        arguments[2], copy, py::int_(parameter._version()), address(parameter.storage())));
    if (PyDict_SetItem(found.ptr(), key, made.ptr())) throw python_error();
  }
  for (const auto& [_, several] : by_type) at::_foreach_copy_(several.first, several.second);
  return found.inc_ref().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef small_copies_functions[] = {
    {"copies_of", plain_function(copies_of), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
