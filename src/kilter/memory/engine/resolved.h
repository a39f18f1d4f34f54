// A recipe that was read off autograd's graph once, found again in the graph of another pass. What
// is compared and taken is in resolved.py; where anything is not as it was, Python reads the recipe.

#pragma once

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <typeinfo>

#include "operator_calls.h"

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using NodePointer = decltype(torch::autograd::Edge::function);  // of two kinds, by version

// `SourceKind` and `SourceUse` of resolved.py.
enum class SourceKind : long long { kNothing, kSaved, kOutput, kHeld, kLeaf };
enum class SourceUse : long long { kInPlace, kCopied, kParameter };

struct FoundNode {
  long long before, edge;      // -1: it made the tensor
  const std::type_info* type;  // nullptr: there is no node
  uint32_t output;
};

struct FoundOutput {
  size_t node;
  uint32_t output;
  caffe2::TypeMeta dtype;
  std::vector<c10::SymInt> size;
};

struct Place {
  SourceKind kind;
  size_t node;
  py::object name;
  SourceUse use;
  size_t size_bytes;
  py::object dtype;  // it is read in this type; None: as it is
  std::ptrdiff_t offset = 0;  // in the node, of the variable that it saved; 0: Python finds it
};

// The same number, or the same ones in the same order; of the same type, and with the same bits.
bool same(PyObject* one, PyObject* other) {
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  if (PyFloat_CheckExact(one)) {
    const double first = PyFloat_AS_DOUBLE(one), second = PyFloat_AS_DOUBLE(other);
    return std::memcmp(&first, &second, sizeof first) == 0;
  }
  if (!PyTuple_CheckExact(one) && !PyList_CheckExact(one)) {
    const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
    if (equal < 0) throw python_error();
    return equal != 0;
  }
  const auto count = PySequence_Fast_GET_SIZE(one);
  if (count != PySequence_Fast_GET_SIZE(other)) return false;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!same(PySequence_Fast_GET_ITEM(one, i), PySequence_Fast_GET_ITEM(other, i))) return false;
  return true;
}

// `_parameter_of` of recompute.py finds one.
bool is_of_parameter(PyObject* object) {
  const auto root = root_of(object);
  const Tensor& tensor = THPVariable_Unpack(root.ptr());
  return !of_class(root.ptr(), names.tensor) || (tensor.is_leaf() && tensor.requires_grad());
}

// What a recipe reads in this pass, as far as it was found.
struct Reading {
  const Position* position;
  PyObject* tensor;
  PyObject* in_place;  // dict: `Reader.in_place`
  PyObject* small;     // `SmallCopies`
  PyObject* leaves;    // dict: `Leaves.known`
  std::vector<py::object> objects;  // Python's, of the nodes that were asked
  std::vector<NodePointer> nodes;
  std::vector<py::object> copied;  // sources that are to read a copy
  py::list given, sources, closed, parameters;
  bool in_backward = false;

  Reading(const Position* at, PyObject* read, PyObject* known, PyObject* copies, PyObject* unwritten,
          size_t count)
      : position(at), tensor(read), in_place(known), small(copies), leaves(unwritten), objects(count) {
    nodes.reserve(count);
  }

  py::object object_of(size_t node) {
    if (!objects[node]) objects[node] = owned(torch::autograd::functionToPyObject(nodes[node]));
    return objects[node];
  }

  // What the node saved there, as it was packed.
  py::object packed(const Place& place) {
    if (place.offset) {
      const auto* node = reinterpret_cast<const char*>(nodes[place.node].get());
      const auto* saved = reinterpret_cast<const SavedVariable*>(node + place.offset);
      const auto found = saved->retrieve_unpack_hook_data();
      if (found) return py::reinterpret_borrow<py::object>(found->second.ptr(getPyInterpreter()));
    }
    return attribute(attribute(object_of(place.node).ptr(), place.name.ptr()).ptr(), names.data);
  }

  void reads(PyObject* saved) {
    sources.append(py::handle(saved));
    if (slot(saved, slots.cast) == Py_False) closed.append(py::handle(saved));
  }

  bool within_pass(PyObject* saved) const {
    return of_class(saved, names.saved) && slot(saved, slots.store) == position->held.store &&
           slot(saved, slots.within) == referred_to(position->held.within).ptr();
  }

  bool take_saved(const Place& place) {
    const auto view = packed(place);
    if (!of_class(view.ptr(), names.view)) return false;
    PyObject* saved = PyTuple_GET_ITEM(view.ptr(), 0);
    if (!within_pass(saved)) return false;
    given.append(view);
    reads(saved);
    return true;
  }

  // `Store.produced_by`.
  bool take_output(const Place& place) {
    auto* metadata = nodes[place.node]->metadata();
    PyObject* notes = static_cast<torch::autograd::PyAnomalyMetadata*>(metadata)->dict();
    PyObject* found = PyDict_GetItemWithError(notes, names.output);
    if (found == nullptr) return false;
    const auto saved = referred_to(PyTuple_GET_ITEM(found, 0));
    if (saved.is_none() || !within_pass(saved.ptr()) || !unchanged(saved.ptr())) return false;
    PyObject* layout = PyTuple_GET_ITEM(found, 1);
    PyObject* view = empty(names.view, static_cast<size_t>(1 + PyTuple_GET_SIZE(layout)));
    PyTuple_SET_ITEM(view, 0, Py_NewRef(saved.ptr()));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(layout); i++)
      PyTuple_SET_ITEM(view, 1 + i, Py_NewRef(PyTuple_GET_ITEM(layout, i)));
    given.append(py::reinterpret_steal<py::object>(view));
    reads(saved.ptr());
    return true;
  }

  // What our own hook packed and left to autograd, or a number, for which autograd asks no hook.
  bool take_held(const Place& place) {
    const auto kept = packed(place);
    if (ordinary(kept.ptr())) {
      const auto variable = attribute(object_of(place.node).ptr(), place.name.ptr());
      if (!attribute(variable.ptr(), names.unpack_hook).is_none()) return false;
      const Tensor& tensor = THPVariable_Unpack(kept.ptr());
      return use(place, source_of(detached(tensor), py::int_(tensor._version())));
    }
    if (!PyTuple_CheckExact(kept.ptr()) || PyTuple_GET_SIZE(kept.ptr()) < 3) return false;
    PyObject* mark = PyTuple_GET_ITEM(kept.ptr(), 2);
    if (mark != names.leaf && !of_class(mark, names.itself)) return false;
    return use(place, source_of(py::handle(PyTuple_GET_ITEM(kept.ptr(), 0)),
                                py::handle(PyTuple_GET_ITEM(kept.ptr(), 1))));
  }

  // `HeldSource`.
  static py::object source_of(py::handle tensor, py::handle version) {
    auto* type = reinterpret_cast<PyTypeObject*>(names.source);
    auto source = owned(type->tp_alloc(type, 0));
    put(source.ptr(), slots.read_tensor, Py_NewRef(tensor.ptr()));
    put(source.ptr(), slots.read_version, Py_NewRef(version.ptr()));
    put(source.ptr(), slots.read_take, Py_NewRef(Py_None));
    put(source.ptr(), slots.read_dtype, Py_NewRef(Py_None));
    return source;
  }

  bool take_leaf(const Place& place, PyObject* reader) {
    const auto* node = dynamic_cast<torch::autograd::AccumulateGrad*>(nodes[place.node].get());
    if (node == nullptr) return false;
    const auto leaf = owned(THPVariable_Wrap(node->variable));
    const auto version = version_at_begin(leaf.ptr());
    const auto source =
        version ? source_of(leaf, version)
                : ask(position, attribute(reader, names.leaf_again).ptr(), leaf.ptr());
    return !source.is_none() && use(place, source);
  }

  // `Leaves.unwritten`: the version of a known parameter when the pass began, or nothing. (`use`
  // compares it with the present one.)
  py::object version_at_begin(PyObject* leaf) const {
    if (!ordinary(leaf)) return {};
    const auto key = owned(PyLong_FromVoidPtr(leaf));
    PyObject* known = PyDict_GetItemWithError(leaves, key.ptr());
    if (known == nullptr) return {};
    const auto storage = attribute(PyTuple_GET_ITEM(known, 0), names.storage_key);
    if (PyLong_AsVoidPtr(storage.ptr()) != THPVariable_Unpack(leaf).storage().unsafeGetStorageImpl())
      return {};
    return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(known, 2));
  }

  // `Reader._own`, with what came of it before.
  bool use(const Place& place, const py::object& source) {
    PyObject* held = slot(source.ptr(), slots.read_tensor);
    if (!ordinary(held)) return false;
    const Tensor& tensor = THPVariable_Unpack(held);
    const c10::Storage& storage = tensor.storage();
    if (!storage.resizable() || !of_the_framework(storage, tensor.is_cuda())) return false;
    if (tensor.nbytes() != place.size_bytes || storage.nbytes() == 0 ||
        tensor._version() != number_in(source.ptr(), slots.read_version))
      return false;
    put(source.ptr(), slots.read_dtype, Py_NewRef(place.dtype.ptr()));
    given.append(source);
    if (place.use == SourceUse::kInPlace) return read_in_place(source, held);
    if (place.use == SourceUse::kCopied) {
      copied.push_back(source);
      return true;
    }
    parameters.append(source);
    in_backward |= place.kind == SourceKind::kLeaf;
    return is_of_parameter(held);
  }

  // `Reader._private`: beside the tuple of our hook only recipes hold this tensor.
  bool read_in_place(const py::object& source, PyObject* held) {
    const auto key = owned(PyLong_FromVoidPtr(held));
    const auto none = owned(PyList_New(0));
    PyObject* others = PyDict_SetDefault(in_place, key.ptr(), none.ptr());
    if (others == nullptr) throw python_error();
    Py_ssize_t readers = 1;  // this one
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); i++) {
      const auto other = referred_to(PyList_GET_ITEM(others, i));
      readers += !other.is_none() && slot(other.ptr(), slots.read_tensor) == held;
    }
    if (Py_REFCNT(held) > 1 + readers || !alone(position, held)) return false;
    const auto reference = owned(PyWeakref_NewRef(source.ptr(), nullptr));
    if (PyList_Append(others, reference.ptr())) throw python_error();
    return true;
  }

  // `HeldSource.own`, of the copy that `Reader._copy_of` finds.
  void read_copy(const py::object& source) {
    const auto copy = copy_of(slot(source.ptr(), slots.read_tensor),
                              slot(source.ptr(), slots.read_dtype));
    if (!copy) {  // one is made now
      ask(position, attribute(source.ptr(), names.own).ptr(), Py_None);
      return;
    }
    const auto version = THPVariable_Unpack(copy.ptr())._version();
    put(source.ptr(), slots.read_version, PyLong_FromLongLong(version));
    put(source.ptr(), slots.read_tensor, Py_NewRef(copy.ptr()));
  }

  // The copy from the beginning of the pass, or nothing: `SmallCopies.of`. (The pass is on one
  // stream.)
  py::object copy_of(PyObject* held, PyObject* dtype) const {
    if (!of_class(held, names.parameter) || !alone(position, held)) return {};
    const auto key = py::make_tuple(owned(PyLong_FromVoidPtr(held)), py::handle(dtype));
    const auto now = py::make_tuple(py::handle(held), 0);
    const auto copies = attribute(small, names.copies_made), wanted = attribute(small, names.wanted);
    if (PyDict_SetItem(wanted.ptr(), key.ptr(), now.ptr())) throw python_error();
    PyObject* found = PyDict_GetItemWithError(copies.ptr(), key.ptr());
    const Tensor& tensor = THPVariable_Unpack(held);
    if (found == nullptr || PyLong_AsLongLong(PyTuple_GET_ITEM(found, 1)) != tensor._version() ||
        PyLong_AsVoidPtr(PyTuple_GET_ITEM(found, 2)) != tensor.storage().unsafeGetStorageImpl())
      return {};
    return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(found, 0));
  }

  bool take(const Place& place, PyObject* reader) {
    switch (place.kind) {
      case SourceKind::kNothing: return packed(place).is_none();
      case SourceKind::kSaved: return take_saved(place);
      case SourceKind::kOutput: return take_output(place);
      case SourceKind::kHeld: return take_held(place);
      case SourceKind::kLeaf: return take_leaf(place, reader);
    }
    return false;
  }
};

class ResolvedRecipe {
 public:
  // The reader, the recipe of this tensor that it has read, and the `RecipeTrace` of that.
  ResolvedRecipe(py::object reader, const py::object& tensor, const py::object& recipe,
                 const py::object& trace)
      : reader_(std::move(reader)) {
    for (const Py_ssize_t place : always())
      made_.push_back(py::reinterpret_borrow<py::object>(slot(recipe.ptr(), place)));
    std::vector<NodePointer> nodes;
    for (const auto& one : trace.attr("nodes")) {
      const auto [before, edge] = one.cast<std::pair<long long, long long>>();
      const auto [node, output] = node_behind(tensor.ptr(), nodes, before, edge);
      nodes.push_back(node);
      nodes_.push_back({before, edge, type_of(node.get()), output});
    }
    counts_ = trace.attr("counts").cast<decltype(counts_)>();
    numbers_ = trace.attr("numbers").cast<decltype(numbers_)>();
    epsilons_ = trace.attr("epsilons").cast<decltype(epsilons_)>();
    for (const auto& one : trace.attr("shapes")) {
      const auto [node, output] = one.cast<std::pair<size_t, uint32_t>>();
      const auto& like = nodes.at(node)->input_metadata(output);
      outputs_.push_back({node, output, like.dtype(), like.shape_as_dim_vector().vec()});
    }
    for (const auto& one : trace.attr("found")) {
      const auto [kind, node, name, use, size_bytes, dtype] =
          one.cast<std::tuple<long long, size_t, py::object, long long, size_t, py::object>>();
      places_.push_back({static_cast<SourceKind>(kind), node, name, static_cast<SourceUse>(use),
                         size_bytes, dtype, offset_of(nodes.at(node), name)});
    }
    carry_out_here(slot(recipe.ptr(), slots.made_calls));
  }

  // The recipe of this tensor, in the pass that the position is in, or None.
  py::object read(const Position* position, PyObject* tensor) const {
    const auto touched = attribute(position->held.store, names.touched);
    if (PyDict_GET_SIZE(touched.ptr())) return py::none();
    const auto in_place = attribute(reader_.ptr(), names.in_place);
    const auto copies = attribute(reader_.ptr(), names.copies);
    const auto leaves = attribute(attribute(reader_.ptr(), names.leaves).ptr(), names.known);
    Reading reading(position, tensor, in_place.ptr(), copies.ptr(), leaves.ptr(), nodes_.size());
    if (!alike(THPVariable_Unpack(tensor)) || !walk(reading) || !compare(reading)) return py::none();
    for (const Place& place : places_)
      if (!reading.take(place, reader_.ptr())) return py::none();
    if (!compare_epsilons(reading)) return py::none();  // it finds a norm by its own weight
    for (const auto& source : reading.copied) reading.read_copy(source);
    return recipe(reading);
  }

 private:
  // `OperatorCalls.compiled`, where all constants are of known kinds.
  static void carry_out_here(PyObject* calls) {
    try {
      if (of_class(calls, names.calls))
        put(calls, slots.compiled, py::cast(OperatorCalls(calls)).release().ptr());
    } catch (const std::runtime_error&) {  // a constant of another kind: Python carries them out
    } catch (const c10::Error&) {          // an operator that the dispatcher does not know: likewise
    }
  }

  // What a `Recipe` has in each pass, in the order of `made_`.
  static std::array<Py_ssize_t, 5> always() {
    return {slots.made_calls, slots.made_by, slots.made_dtype, slots.made_size, slots.made_stride};
  }

  static const std::type_info* type_of(const Node* node) {
    return node == nullptr ? nullptr : &typeid(*node);
  }

  // Where in a node of its kind a variable of this name is.
  static std::ptrdiff_t offset_of(const NodePointer& node, const py::object& name) {
    if (PyUnicode_GET_LENGTH(name.ptr()) == 0) return 0;
    const auto object = owned(torch::autograd::functionToPyObject(node));
    const auto raw = attribute(object.ptr(), name.ptr());
    try {
      const auto* saved = raw.cast<const SavedVariable*>();
      return reinterpret_cast<const char*>(saved) - reinterpret_cast<const char*>(node.get());
    } catch (const py::cast_error&) {  // the framework was built with another pybind11
      return 0;
    }
  }

  // The node that an edge leads to, and of which output; -1: the one that made the tensor.
  static std::pair<NodePointer, uint32_t> node_behind(PyObject* object,
                                                      const std::vector<NodePointer>& nodes,
                                                      long long before, long long number) {
    if (before >= 0) {
      const auto& edge = nodes[static_cast<size_t>(before)]->next_edge(static_cast<size_t>(number));
      return {edge.function, edge.input_nr};
    }
    const Tensor base = whole_of(THPVariable_Unpack(object));
    return {base.grad_fn(), static_cast<uint32_t>(base.output_nr())};
  }

  // The whole storage behind the tensor is as it was.
  bool alike(const Tensor& tensor) const {
    const Tensor base = whole_of(tensor);
    if (!base.has_storage() || base.storage_offset() != 0 ||
        base.storage().nbytes() != base.nbytes() ||
        base.storage().unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl())
      return false;
    const auto dtype = reinterpret_cast<THPDtype*>(made_[2].ptr())->scalar_type;
    return base.scalar_type() == dtype && base.sizes() == integers(made_[3].ptr()) &&
           base.strides() == integers(made_[4].ptr());
  }

  // The nodes, where they are as they were.
  bool walk(Reading& reading) const {
    for (const FoundNode& found : nodes_) {
      if (found.before >= 0) {
        const auto edges = reading.nodes[static_cast<size_t>(found.before)]->num_outputs();
        if (found.edge >= static_cast<long long>(edges)) return false;
      }
      auto [node, output] = node_behind(reading.tensor, reading.nodes, found.before, found.edge);
      const auto* type = type_of(node.get());
      if ((type == nullptr) != (found.type == nullptr)) return false;
      if (type != nullptr && (*type != *found.type || output != found.output)) return false;
      reading.nodes.push_back(std::move(node));
    }
    return true;
  }

  // What the nodes keep is as it was.
  bool compare(Reading& reading) const {
    for (const auto& [node, count] : counts_)
      if (reading.nodes[node]->num_outputs() != count) return false;
    for (const FoundOutput& found : outputs_) {
      if (reading.nodes[found.node]->num_inputs() <= found.output) return false;
      const auto& like = reading.nodes[found.node]->input_metadata(found.output);
      if (like.dtype() != found.dtype ||
          like.shape_as_dim_vector() != c10::SymIntArrayRef(found.size))
        return false;
    }
    for (const auto& [node, name, value] : numbers_)
      if (!same(attribute(reading.object_of(node).ptr(), name.ptr()).ptr(), value.ptr()))
        return false;
    return true;
  }

  bool compare_epsilons(Reading& reading) const {
    for (const auto& [node, weight, value] : epsilons_) {
      PyObject* source = weight < 0 ? Py_None : PyList_GET_ITEM(reading.given.ptr(), weight);
      const auto again = attribute(reader_.ptr(), names.epsilon_again);
      const auto object = reading.object_of(node);
      const auto found = ask(reading.position, again.ptr(), object.ptr(), source);
      if (!same(found.ptr(), value.ptr())) return false;
    }
    return true;
  }

  py::object recipe(const Reading& reading) const {
    auto* type = reinterpret_cast<PyTypeObject*>(names.recipe);
    auto made = owned(type->tp_alloc(type, 0));
    size_t at = 0;
    for (const Py_ssize_t place : always())
      put(made.ptr(), place, Py_NewRef(made_[at++].ptr()));
    put(made.ptr(), slots.given, PyList_AsTuple(reading.given.ptr()));
    put(made.ptr(), slots.sources, PyList_AsTuple(reading.sources.ptr()));
    put(made.ptr(), slots.closed, PyList_AsTuple(reading.closed.ptr()));
    put(made.ptr(), slots.parameters, PyList_AsTuple(reading.parameters.ptr()));
    put(made.ptr(), slots.in_backward, PyBool_FromLong(reading.in_backward));
    put(made.ptr(), slots.told, Py_NewRef(Py_False));
    return made;
  }

  py::object reader_;
  std::vector<py::object> made_;  // the calls, what the operation is called, type, size, strides
  std::vector<FoundNode> nodes_;
  std::vector<std::pair<size_t, uint32_t>> counts_;
  std::vector<std::tuple<size_t, py::object, py::object>> numbers_;
  std::vector<FoundOutput> outputs_;
  std::vector<std::tuple<size_t, long long, py::object>> epsilons_;
  std::vector<Place> places_;
};

}  // namespace
