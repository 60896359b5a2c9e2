// Structs of named fields as the argument lists of operators.
//
// A struct lists its fields once, in the order of a schema: its `arguments()` returns `fields(...)` of them.
// `Unboxed<Call>` derives from that list the signature that the dispatcher wants, and kernels that take the
// arguments of the schema and hand on the struct.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace attn_ext {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalSymInts = std::optional<std::vector<c10::SymInt>>;

inline at::Tensor tensor_or_undefined(const OptionalTensor& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}

inline OptionalTensor optional_of(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

/// References to fields; what is none is kept by value.
template <class... Field>
std::tuple<Field...> fields(Field&&... field) {
  return {std::forward<Field>(field)...};
}

/// A tensor that is undefined where the schema has None.
template <class Tensor>
struct OrNone {
  Tensor& tensor;
};

template <class Tensor>
OrNone<Tensor> or_none(Tensor& tensor) {
  return {tensor};
}
inline OptionalTensor& or_none(OptionalTensor& tensor) {
  return tensor;
}
inline const OptionalTensor& or_none(const OptionalTensor& tensor) {
  return tensor;
}

/// How the argument of a field stands in an op's signature.
template <class Field>
struct InSignature {
  using Type = Field;
};
template <>
struct InSignature<at::Tensor> {
  using Type = const at::Tensor&;
};
template <>
struct InSignature<OrNone<at::Tensor>> {
  using Type = const OptionalTensor&;
};
template <>
struct InSignature<OptionalSymInts> {
  using Type = at::OptionalSymIntArrayRef;
};

/// An argument into its field.
template <class T>
void put(T& field, T& argument) {
  field = std::move(argument);
}
inline void put(at::Tensor& field, const at::Tensor& argument) {
  field = argument;
}
inline void put(OrNone<at::Tensor> field, const OptionalTensor& argument) {
  if (argument.has_value()) {
    field.tensor = *argument;
  }
}
inline void put(OptionalSymInts& field, const at::OptionalSymIntArrayRef& argument) {
  if (argument.has_value()) {
    field.emplace(argument->begin(), argument->end());
  }
}

/// A field as an argument.
template <class T>
const T& get(const T& field) {
  return field;
}
inline OptionalTensor get(OrNone<const at::Tensor> field) {
  return optional_of(field.tensor);
}
inline OptionalTensor get(OrNone<at::Tensor> field) {
  return optional_of(field.tensor);
}
inline at::OptionalSymIntArrayRef get(const OptionalSymInts& field) {
  return field.has_value() ? at::OptionalSymIntArrayRef(*field) : std::nullopt;
}

template <class Call, class Fields = decltype(std::declval<Call&>().arguments())>
struct Unboxed;

template <class Call, class... Field>
struct Unboxed<Call, std::tuple<Field...>> {
  template <class T>
  using Argument = typename InSignature<std::remove_reference_t<T>>::Type;

  static constexpr size_t kArguments = sizeof...(Field);

  template <class Result>
  using Signature = Result(Argument<Field>...);

  /// `function` is Result(const Call&).
  template <auto function>
  static auto kernel(Argument<Field>... arguments) {
    return function(make(arguments...));
  }

  /// `function` is Result(DispatchKeySet, const Call&).
  template <auto function>
  static auto kernel_with_keys(c10::DispatchKeySet keys, Argument<Field>... arguments) {
    return function(keys, make(arguments...));
  }

 private:
  template <class... T>
  static Call make(T&... arguments) {
    Call call;
    std::apply([&](auto&&... field) { (put(field, arguments), ...); }, call.arguments());
    return call;
  }
};

/// The op of that name with the signature of Unboxed<Call>.
template <class Call, class Result>
auto find_op(const char* name) {
  using Signature = typename Unboxed<Call>::template Signature<Result>;
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

/// Calls it with `fields` as its arguments.
template <class Op, class Fields>
auto call_op(const Op& op, const Fields& fields) {
  return std::apply([&](const auto&... field) { return op.call(get(field)...); }, fields);
}

}  // namespace attn_ext
