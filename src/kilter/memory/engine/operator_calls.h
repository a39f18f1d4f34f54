// Carries out a resolved recipe: the calls of operators that make a tensor again (`OperatorCalls` of
// operation_graph.py), without Python where they are the framework's. Where anything is not as it
// was, or an operator fails, Python carries the recipe out, and says why.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "moves.h"
#include "norm_kernel.h"

namespace {

using c10::IValue;
using SlotNumber = long long;  // as in Python: what is given from 0 on, what calls have made below
constexpr SlotNumber kNoSlot = std::numeric_limits<SlotNumber>::min();

struct CallArgument {
  enum { Constant, One, List, OptionalList } kind = Constant;
  IValue constant;
  py::object object;  // the constant, for a function of Python's
  std::vector<SlotNumber> slots;
};

struct OperatorCall {
  std::optional<c10::OperatorHandle> operation;  // none: a function of Python's
  py::object function;
  bool norm = false;  // it is `fused.layer_norm`
  std::vector<CallArgument> arguments;
  size_t output;
  std::vector<SlotNumber> frees;
};

class OperatorCalls {
 public:
  // Of Python's list; throws where a constant is of a kind that is not known here.
  explicit OperatorCalls(py::handle calls) : result_(number_of(calls.attr("result"))) {
    size_t place = 0;
    const auto frees = calls.attr("frees").cast<std::vector<std::vector<SlotNumber>>>();
    slot_class_ = py::type::handle_of(calls.attr("result"));
    const auto fused = py::module_::import("kilter.memory.engine.fused");
    kernels_ = fused.attr("kernels");
    const auto layer_norm = fused.attr("layer_norm");
    for (const auto& one : calls.attr("calls")) {
      OperatorCall call;
      call.function = one.attr("operator");
      const py::tuple arguments = one.attr("arguments");
      const py::dict keywords = one.attr("keywords");
      const py::object output = one.attr("output");
      call.output = output.is_none() ? 0 : output.cast<size_t>();
      call.frees = frees.at(place++);
      if (py::hasattr(call.function, "_schema")) {
        of_the_schema(call, arguments, keywords);
      } else {
        if (!keywords.empty() || !output.is_none()) throw std::runtime_error("not known here");
        for (const auto& argument : arguments) call.arguments.push_back(to_python(argument));
        call.norm = call.function.is(layer_norm);
      }
      calls_.push_back(std::move(call));
    }
  }

  Tensor run(const Position* position, std::vector<Tensor> given) const {
    const at::NoGradGuard ungraded;
    const c10::impl::ExcludeDispatchKeyGuard uncast(c10::autocast_dispatch_keyset);
    std::vector<Tensor> made(calls_.size());
    const auto at = [&](SlotNumber number) -> Tensor& {
      return number >= 0 ? given.at(static_cast<size_t>(number))
                         : made.at(static_cast<size_t>(-1 - number));
    };
    for (size_t place = 0; place < calls_.size(); place++) {
      const OperatorCall& call = calls_[place];
      made[place] = call.operation ? operated(call, at) : asked(position, call, at);
      for (const SlotNumber number : call.frees) at(number).reset();
    }
    return at(result_);
  }

 private:
  static SlotNumber number_of(py::handle slot) { return slot.attr("number").cast<SlotNumber>(); }

  bool is_slot(py::handle value) const { return of_class(value.ptr(), slot_class_.ptr()); }

  CallArgument to_python(py::handle value) const {
    CallArgument found;
    found.object = py::reinterpret_borrow<py::object>(value);
    if (is_slot(value)) {
      found.kind = CallArgument::One;
      found.slots.push_back(number_of(value));
    }
    return found;
  }

  void of_the_schema(OperatorCall& call, const py::tuple& arguments, const py::dict& keywords) const {
    const auto named = call.function.attr("_schema");
    call.operation = c10::Dispatcher::singleton().findSchemaOrThrow(
        named.attr("name").cast<std::string>().c_str(),
        named.attr("overload_name").cast<std::string>().c_str());
    const auto& schema = call.operation->schema();
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const auto& wanted = schema.arguments()[i];
      const auto name = py::str(wanted.name());
      if (i < arguments.size()) {
        call.arguments.push_back(argument(arguments[i], wanted.type()));
      } else if (keywords.contains(name)) {
        call.arguments.push_back(argument(keywords[name], wanted.type()));
      } else {
        call.arguments.emplace_back().constant = wanted.default_value().value();
      }
    }
  }

  CallArgument argument(py::handle value, const c10::TypePtr& type) const {
    CallArgument found;
    const auto list = type->cast<c10::ListType>();
    const auto optional = list ? list->getElementType()->cast<c10::OptionalType>() : nullptr;
    if (is_slot(value)) {
      found.kind = CallArgument::One;
      found.slots.push_back(number_of(value));
    } else if (optional || (list && list->getElementType()->kind() == c10::TypeKind::TensorType)) {
      found.kind = optional ? CallArgument::OptionalList : CallArgument::List;
      for (const auto& one : value) found.slots.push_back(one.is_none() ? kNoSlot : number_of(one));
    } else {
      found.constant = constant(value, type);
    }
    return found;
  }

  static IValue constant(py::handle value, const c10::TypePtr& type) {
    PyObject* object = value.ptr();
    if (object == Py_None) return {};
    if (const auto optional = type->cast<c10::OptionalType>())
      return constant(value, optional->getElementType());
    if (PyBool_Check(object)) return value.cast<bool>();
    if (PyLong_Check(object) && type->kind() != c10::TypeKind::FloatType)
      return value.cast<int64_t>();
    if (PyLong_Check(object) || PyFloat_Check(object)) return value.cast<double>();
    if (PyUnicode_Check(object)) return value.cast<std::string>();
    if (THPDtype_Check(object))
      return static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type);
    const auto list = type->cast<c10::ListType>();
    if (!list || !(PyList_Check(object) || PyTuple_Check(object)))
      throw std::runtime_error("not known here");
    switch (list->getElementType()->kind()) {
      case c10::TypeKind::FloatType: return value.cast<std::vector<double>>();
      case c10::TypeKind::BoolType: return value.cast<std::vector<bool>>();
      default: return value.cast<std::vector<int64_t>>();
    }
  }

  template <class At>
  static Tensor operated(const OperatorCall& call, const At& at) {
    torch::jit::Stack stack;
    stack.reserve(call.arguments.size());
    for (const CallArgument& argument : call.arguments) {
      if (argument.kind == CallArgument::Constant) {
        stack.push_back(argument.constant);
      } else if (argument.kind == CallArgument::One) {
        stack.emplace_back(at(argument.slots[0]));
      } else if (argument.kind == CallArgument::List) {
        c10::List<Tensor> list;
        for (const SlotNumber number : argument.slots) list.push_back(at(number));
        stack.emplace_back(std::move(list));
      } else {
        c10::List<std::optional<Tensor>> list;
        for (const SlotNumber number : argument.slots)
          list.push_back(number == kNoSlot ? std::nullopt : std::optional<Tensor>(at(number)));
        stack.emplace_back(std::move(list));
      }
    }
    const py::gil_scoped_release released;
    call.operation->callBoxed(&stack);
    return stack.at(call.output).toTensor();
  }

  template <class At>
  Tensor asked(const Position* position, const OperatorCall& call, const At& at) const {
    if (call.norm)
      if (auto made = fused(call, at)) return std::move(*made);
    py::tuple arguments(call.arguments.size());
    for (size_t i = 0; i < call.arguments.size(); i++) {
      const CallArgument& argument = call.arguments[i];
      arguments[i] = argument.kind == CallArgument::One
                         ? owned(THPVariable_Wrap(at(argument.slots[0])))
                         : argument.object;
    }
    const auto with_room = attribute(position->held.store, names.call_with_room);
    const auto found = ask(position, with_room.ptr(), call.function.ptr(), arguments.ptr());
    return THPVariable_Unpack(found.ptr());
  }

  template <class At>
  std::optional<Tensor> fused(const OperatorCall& call, const At& at) const {
    std::array<const Tensor*, 5> given{};  // the tensor, its statistics, weight and bias
    for (size_t i = 0; i < given.size(); i++) {
      if (call.arguments[i].kind == CallArgument::One) given[i] = &at(call.arguments[i].slots[0]);
      if (given[i] == nullptr && i < 3) return {};
    }
    if (PyList_GET_SIZE(call.arguments[5].object.ptr()) != 1) return {};
    return normalised(kernels_.ptr(), given, call.arguments[7].object.ptr());
  }

  std::vector<OperatorCall> calls_;
  SlotNumber result_;
  py::handle slot_class_;
  py::object kernels_;  // dict: of `fused`, by device, type and width
};

// `Store.tensor_of`, or what a `HeldSource` gives. None: left to Python.
std::optional<Tensor> source_read(const Position* self, PyObject* given) {
  if (of_class(given, names.view)) {
    PyObject* saved = PyTuple_GET_ITEM(given, 0);
    if (number_in(saved, slots.state) != kResident) fetch(self, saved);
    PyObject* alias = slot(saved, slots.alias);
    if (number_in(saved, slots.state) != kResident || !ordinary(alias) || !as_saved(saved, alias))
      return {};
    return tensor_on(THPVariable_Unpack(alias), given);
  }
  if (!of_class(given, names.source) || slot(given, slots.read_take) != Py_None) return {};
  PyObject* held = slot(given, slots.read_tensor);
  PyObject* dtype = slot(given, slots.read_dtype);
  if (!ordinary(held)) return {};
  const Tensor& tensor = THPVariable_Unpack(held);
  if (tensor._version() != number_in(given, slots.read_version)) return {};
  if (dtype == Py_None) return tensor;
  const at::NoGradGuard ungraded;
  return tensor.to(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
}

// `Recipe.make` of recompute.py. None: left to Python.
py::object made_again(const Position* self, PyObject* recipe) {
  PyObject* calls = slot(recipe, slots.made_calls);
  if (!of_class(calls, names.calls) || slot(calls, slots.compiled) == Py_None) return py::none();
  const auto compiled = py::reinterpret_borrow<py::object>(slot(calls, slots.compiled));
  const auto all = py::reinterpret_borrow<py::object>(slot(recipe, slots.given));
  std::vector<Tensor> given;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all.ptr()); i++) {
    auto read = source_read(self, PyTuple_GET_ITEM(all.ptr(), i));
    if (!read) return py::none();
    given.push_back(std::move(*read));
  }
  try {
    const at::NoGradGuard ungraded;
    Tensor made = compiled.cast<const OperatorCalls&>().run(self, std::move(given));
    if (made.requires_grad()) made = made.detach();  // nothing was to be done to a parameter
    const auto size = integers(slot(recipe, slots.made_size));
    const auto stride = integers(slot(recipe, slots.made_stride));
    const auto dtype = reinterpret_cast<THPDtype*>(slot(recipe, slots.made_dtype))->scalar_type;
    if (made.scalar_type() != dtype || made.sizes() != size) return py::none();
    const bool whole = made.strides() == stride && made.storage_offset() == 0 &&
                       made.storage().nbytes() == made.nbytes();
    if (!whole) made = at::empty_strided(size, stride, made.options()).copy_(made);
    return owned(THPVariable_Wrap(made));
  } catch (const c10::Error&) {
    return py::none();
  }
}

}  // namespace
