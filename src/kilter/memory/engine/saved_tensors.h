// What tensor_hooks.py and store.py find out about each saved tensor, without Python.
//
// Each function has its double in Python, which is asked (None is given) where a tensor is not an
// ordinary one. Nothing in here goes through the dispatcher.

#pragma once

#include <structmember.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace {

using at::Tensor;

constexpr long long kResident = 0, kPrefetching = 1, kEvicted = 2;  // of store.py

// Of Python; never freed.
struct Names {
  PyObject *tensor, *parameter, *size, *modes, *itself, *saved, *view, *transfer, *recipe, *source,
      *calls, *leaf, *output, *written;
  PyObject *level, *dtype, *down, *grad_fn, *metadata, *present, *members, *resident,
      *touched, *counts, *alive, *held_bytes, *beside_bytes, *segment_peak_bytes, *held_peak_bytes,
      *evicted, *evicted_bytes, *dependents, *backend, *spoils, *untyped_storage, *ask,
      *tell, *waits, *stream, *wait, *copy_out, *copy_in, *room_like, *recompute,
      *recomputed, *out_bytes, *in_bytes, *data, *in_place, *leaf_again, *epsilon_again, *copies,
      *copies_made, *wanted, *own, *unpack_hook, *call_with_room, *leaves, *known, *storage_key,
      *pack, *pack_any, *unpack_otherwise;
};
Names names;

// Where `Saved` and `Transfer` of store.py, `Recipe` of recompute.py, `HeldSource` and
// `OperatorCalls` of operation_graph.py have their attributes.
struct Slots {
  Py_ssize_t within, number, size_bytes, key, alias, version, plain, touched, cast, handed_out,
      state, transfer, recipe, calls, store, host, pooled, departure, arrival, closed, sources,
      parameters, in_backward, told, made_calls, made_by, made_dtype, made_size, made_stride, given,
      read_tensor, read_version, read_take, read_dtype, compiled, attributes;
};
Slots slots;

// Takes the reference; throws where there is an error instead.
py::object owned(PyObject* made) {
  if (made == nullptr) throw python_error();
  return py::reinterpret_steal<py::object>(made);
}

Py_ssize_t slot_named(const char* name, PyObject* kind) {
  const auto found = owned(PyObject_GetAttrString(kind, name));
  if (!Py_IS_TYPE(found.ptr(), &PyMemberDescr_Type))
    throw std::runtime_error(std::string("no slot ") + name);
  return reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member->offset;
}

PyObject*& slot(PyObject* saved, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(saved) + offset);
}

// Takes the reference.
void put(PyObject* saved, Py_ssize_t offset, PyObject* value) {
  if (value == nullptr) throw python_error();
  Py_XSETREF(slot(saved, offset), value);
}

long long number_in(PyObject* saved, Py_ssize_t offset) {
  return PyLong_AsLongLong(slot(saved, offset));
}

void name(const py::object& itself, const py::object& saved, const py::object& view,
          const py::object& transfer, const py::object& recipe, const py::object& source,
          const py::object& calls, const py::object& leaf, const py::object& output,
          const py::object& written) {
  const auto own = [](const py::object& object) { return py::object(object).release().ptr(); };
  const auto text = PyUnicode_InternFromString;
  const auto torch = py::module_::import("torch");
  const auto modes = py::module_::import("torch.autograd.forward_ad").attr("__dict__");
  names = {own(torch.attr("Tensor")), own(torch.attr("nn").attr("Parameter")),
           own(torch.attr("Size")), own(modes), own(itself), own(saved), own(view), own(transfer),
           own(recipe), own(source), own(calls), own(leaf), own(output), own(written),
           text("_current_level"), text("dtype"),
           text("down"), text("grad_fn"), text("metadata"), text("present"), text("members"),
           text("_resident"), text("_touched"), text("counts"), text("alive"), text("held_bytes"),
           text("beside_bytes"), text("segment_peak_bytes"), text("held_peak_bytes"),
           text("evicted"), text("evicted_bytes"), text("_dependents"), text("backend"),
           text("spoils"), text("untyped_storage"), text("ask"), text("_tell"), text("waits"),
           text("stream"), text("wait"), text("copy_out"), text("copy_in"), text("room_like"),
           text("recompute"), text("recomputed"), text("out_bytes"), text("in_bytes"),
           text("data"), text("in_place"), text("leaf_again"), text("epsilon_again"),
           text("copies"), text("_copies"), text("_wanted"), text("own"), text("unpack_hook"),
           text("call_with_room"), text("leaves"), text("known"), text("_storage_key"), text("_pack"),
           text("_pack_any"), text("_unpack_otherwise")};
  const auto of = [](const py::object& kind) {
    return [&kind](const char* name) { return slot_named(name, kind.ptr()); };
  };
  const auto storage = of(saved), copies = of(transfer), made = of(recipe), read = of(source),
             list = of(calls), own_one = of(itself);
  slots = {storage("within"), storage("number"), storage("size_bytes"), storage("key"),
           storage("alias"), storage("version"), storage("plain"), storage("touched"),
           storage("cast"), storage("handed_out"), storage("state"), storage("transfer"),
           storage("recipe"), storage("calls"), storage("store"), copies("host"),
           copies("pooled"), copies("departure"), copies("arrival"),
           made("closed"), made("sources"), made("parameters"), made("in_backward"), made("told"),
           made("calls"), made("kind"), made("dtype"), made("size"), made("stride"),
           made("given"), read("tensor"), read("version"), read("take"),
           read("dtype"), list("compiled"), own_one("attributes")};
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

// The tensor itself, or what it is a view of.
Tensor whole_of(const Tensor& tensor) {
  return Tensor(tensor.is_view() ? tensor._base() : tensor);
}

// `root_of` of recompute.py.
py::object root_of(PyObject* object) {
  const auto base = of_class(object, names.tensor) ? base_of(THPVariable_Unpack(object)) : py::object();
  return base ? base : py::reinterpret_borrow<py::object>(object);
}

// Its memory is of the framework's allocator. (Python knows what others there are for the CPU.)
bool of_the_framework(const c10::Storage& storage, bool on_cuda) {
  return on_cuda ||
         storage.data_ptr().get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter();
}

// As `tensor.detach()`: another tensor on the same memory, with the same counter of versions.
py::object detached(const Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  auto alias = impl->shallow_copy_and_detach(impl->version_counter(), true);
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(Tensor(std::move(alias))));
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

// `Itself.of` of store.py.
py::object itself_of(PyObject* object) {
  auto* type = reinterpret_cast<PyTypeObject*>(names.itself);
  const auto arguments = py::reinterpret_steal<py::object>(tuple_of(plain_tuple, py::handle(object)));
  auto made = owned(type->tp_new(type, arguments.ptr(), nullptr));
  const auto own = owned(PyObject_GenericGetDict(object, nullptr));
  const bool any = of_class(object, names.tensor) && PyDict_GET_SIZE(own.ptr());
  put(made.ptr(), slots.attributes, Py_NewRef(any ? own.ptr() : Py_None));
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
// it (`TensorHooks.takes`); then `taken` is that size.
PyObject* pack(PyObject* object, PyObject* device, size_t least, size_t& taken) {
  if (under_a_mode() || !ordinary(object)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  const auto base = base_of(tensor);
  const bool own = of_class(object, names.tensor) && (!base || of_class(base.ptr(), names.tensor));
  if (!own || tensor.nbytes() < least ||
      tensor.device() != reinterpret_cast<THPDevice*>(device)->device ||
      (tensor.requires_grad() && tensor.is_leaf()))
    return keep(object, tensor, base);
  const c10::Storage& storage = tensor.storage();
  const size_t size_bytes = storage.nbytes();
  const Tensor& whole = base ? THPVariable_Unpack(base.ptr()) : tensor;
  if (!whole.has_storage() ||
      whole.storage().unsafeGetStorageImpl() != storage.unsafeGetStorageImpl()) Py_RETURN_NONE;
  if (whole.nbytes() != size_bytes || size_bytes < least || !storage.resizable())
    return keep(object, tensor, base);
  if (!of_the_framework(storage, tensor.is_cuda())) Py_RETURN_NONE;
  taken = size_bytes;
  return tuple_of(plain_tuple, py::int_(size_bytes), address(storage));
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
  const Tensor whole = whole_of(tensor);
  const bool plain = covers(whole, tensor.storage().nbytes());
  return tuple_of(plain_tuple, detached(plain ? whole : tensor), py::int_(tensor._version()),
                  py::bool_(plain));
  END_HANDLE_TH_ERRORS
}

// `Saved` of store.py, not yet of a store; `held` is what `held` above gives.
py::object saved_storage(PyObject* within, PyObject* number, PyObject* size_bytes, PyObject* key,
                         PyObject* held) {
  auto* type = reinterpret_cast<PyTypeObject*>(names.saved);
  auto made = owned(type->tp_alloc(type, 0));
  PyObject* saved = made.ptr();
  put(saved, slots.within, Py_NewRef(within));
  put(saved, slots.number, Py_NewRef(number));
  put(saved, slots.size_bytes, Py_NewRef(size_bytes));
  put(saved, slots.key, Py_NewRef(key));
  put(saved, slots.alias, Py_NewRef(PyTuple_GET_ITEM(held, 0)));
  put(saved, slots.version, Py_NewRef(PyTuple_GET_ITEM(held, 1)));
  put(saved, slots.plain, Py_NewRef(PyTuple_GET_ITEM(held, 2)));
  for (const Py_ssize_t no : {slots.touched, slots.cast, slots.handed_out})
    put(saved, no, Py_NewRef(Py_False));
  put(saved, slots.state, PyLong_FromLongLong(kResident));
  for (const Py_ssize_t none : {slots.transfer, slots.recipe, slots.calls})
    put(saved, none, Py_NewRef(Py_None));
  return made;
}

bool same_layout(const Tensor& one, const Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         one.strides() == other.strides();
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
  const auto dtype = owned(PyObject_GetAttr(object, names.dtype));
  if (arguments[2] == Py_True && same_layout(tensor, alias))
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

Tensor laid_out(const Tensor& alias, PyObject* size, PyObject* stride, PyObject* offset) {
  const auto* impl = alias.unsafeGetTensorImpl();
  auto made = impl->shallow_copy_and_detach(impl->version_counter(), true);
  made->set_sizes_and_strides(integers(size), integers(stride), PyLong_AsLongLong(offset));
  return Tensor(std::move(made));
}

// `view_of` of aliases.py, with the count of writes.
Tensor as_another(const Tensor& alias, at::ScalarType dtype, PyObject* size, PyObject* stride,
                  PyObject* offset) {
  auto made = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(alias.storage()), alias.key_set(), at::scalarTypeToTypeMeta(dtype));
  made->set_sizes_and_strides(integers(size), integers(stride), PyLong_AsLongLong(offset));
  auto counter = made->version_counter();
  counter.set_version(alias._version());
  return Tensor(std::move(made));
}

// What a `View` stands for, on its storage.
Tensor tensor_on(const Tensor& alias, PyObject* view) {
  PyObject *size = PyTuple_GET_ITEM(view, 3), *stride = PyTuple_GET_ITEM(view, 4),
           *offset = PyTuple_GET_ITEM(view, 5);
  if (size == Py_None) return alias;
  const auto dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(view, 2))->scalar_type;
  if (alias.scalar_type() == dtype) return laid_out(alias, size, stride, offset);
  return as_another(alias, dtype, size, stride, offset);
}

// As `alias.as_strided(size, stride, offset)`, but no view.
PyObject* laid_out(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!ordinary(arguments[0])) Py_RETURN_NONE;
  return THPVariable_Wrap(
      laid_out(THPVariable_Unpack(arguments[0]), arguments[1], arguments[2], arguments[3]));
  END_HANDLE_TH_ERRORS
}

// `_is_cast_of_parameter` of store.py.
PyObject* is_cast_of_parameter(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!ordinary(object)) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(object);
  const auto node = whole_of(tensor).grad_fn();
  if (!node || node->name() != "ToCopyBackward0") Py_RETURN_FALSE;
  const auto* before = node->next_edge(0).function.get();
  return PyBool_FromLong(dynamic_cast<const torch::autograd::AccumulateGrad*>(before) != nullptr);
  END_HANDLE_TH_ERRORS
}

// `Store.alone`: of an ordinary tensor, and how many users its storage has then.
bool alone(PyObject* object, long users) {
  const c10::Storage& storage = THPVariable_Unpack(object).storage();
  // Of some versions of the framework, Python's object for the storage counts from when it is made.
  Py_XDECREF(THPStorage_Wrap(storage));
  return static_cast<long>(storage.use_count()) == users;
}

PyObject* alone(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!ordinary(arguments[0])) Py_RETURN_NONE;
  return PyBool_FromLong(alone(arguments[0], PyLong_AsLong(arguments[1])));
  END_HANDLE_TH_ERRORS
}

// `Store._arrived`: sets the counter of writes; the address of the storage.
PyObject* arrived(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!ordinary(arguments[0])) Py_RETURN_NONE;
  const Tensor& tensor = THPVariable_Unpack(arguments[0]);
  auto counter = tensor.unsafeGetTensorImpl()->version_counter();  // the same one
  counter.set_version(PyLong_AsLongLong(arguments[1]));
  return address(tensor.storage()).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* is_under_a_mode(PyObject*, PyObject*) { return PyBool_FromLong(under_a_mode()); }

template <class Function>
PyCFunction plain_function(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef saved_tensor_functions[] = {
    {"under_a_mode", is_under_a_mode, METH_NOARGS, nullptr},
    {"kept", plain_function(kept), METH_FASTCALL, nullptr},
    {"held", held, METH_O, nullptr},
    {"view", plain_function(view), METH_FASTCALL, nullptr},
    {"laid_out", plain_function(static_cast<_PyCFunctionFast>(laid_out)), METH_FASTCALL, nullptr},
    {"alone", plain_function(static_cast<_PyCFunctionFast>(alone)), METH_FASTCALL, nullptr},
    {"arrived", plain_function(arrived), METH_FASTCALL, nullptr},
    {"is_cast_of_parameter", is_cast_of_parameter, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
