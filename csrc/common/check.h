// Argument checks for bind.cpp files: every message names op, argument, what came and what was expected.
// Sizes are named by letters; the first tensor that uses a letter binds it, later ones must agree:
//   Check c("act_mul");
//   c(x, "x").shape({"T", "2F"}).dtype({kBF16, kFP16}).rows();
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "params.h"

namespace pyllm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* name_of(ScalarType t) {
  switch (t) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    default:
      return "an unsupported dtype";
  }
}

// The kernel side's own dtype enum: kernels never see a torch header.
inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Half:
      return DType::kFP16;
    case ScalarType::Float:
      return DType::kFP32;
    case ScalarType::Float8_e4m3fn:
      return DType::kE4M3;
    default:
      throw std::runtime_error(std::string("pyllm: no kernel dtype for ") + name_of(t.scalar_type()));
  }
}

class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  template <class... Args>
  void require(bool ok, const char* argument, const Args&... message) const {
    if (ok) [[likely]]
      return;
    std::ostringstream out;
    out << op_ << ": " << argument << ' ';
    (out << ... << message);
    throw std::runtime_error(out.str());
  }

  class Arg {
   public:
    Arg(Check& check, const Tensor& t, const char* name) : c_(check), t_(t), name_(name) {
      c_.require(t.is_cuda(), name, "is on the CPU, expected a CUDA tensor");
      if (c_.device_ < 0) c_.device_ = t.get_device_index();
      c_.require(t.get_device_index() == c_.device_, name, "is on cuda:", t.get_device_index(), ", expected cuda:", c_.device_);
    }
    // Letters bind on first use; a decimal number is a literal size; "_" takes any size.
    Arg& shape(std::initializer_list<const char*> dims) {
      c_.require(t_.dim() == static_cast<int64_t>(dims.size()), name_, "has ", t_.dim(), " dimensions, expected ", dims.size());
      int64_t i = 0;
      for (const char* d : dims) {
        const int64_t got = t_.size(i);
        if (d[0] >= '0' && d[0] <= '9' && d[1] == 0) {
          c_.require(got == d[0] - '0', name_, ".size(", i, ") is ", got, ", expected ", d);
        } else if (d[0] != '_') {
          auto [at, fresh] = c_.sizes_.try_emplace(d, std::pair{got, name_});
          c_.require(fresh || at->second.first == got, name_, ".size(", i, ") is ", got, ", expected ", d, "=", at->second.first, " (from ",
                     at->second.second, ")");
        }
        ++i;
      }
      return *this;
    }
    Arg& dtype(std::initializer_list<ScalarType> allowed) {
      const ScalarType got = t_.scalar_type();
      std::ostringstream names;
      for (ScalarType a : allowed) {
        if (a == got) return *this;
        names << (names.tellp() > 0 ? " or " : "") << name_of(a);
      }
      c_.require(false, name_, "is ", name_of(got), ", expected ", names.str());
      return *this;
    }
    Arg& dtype_like(const Tensor& other, const char* other_name) {
      c_.require(t_.scalar_type() == other.scalar_type(), name_, "is ", name_of(t_.scalar_type()), ", expected ",
                 name_of(other.scalar_type()), " like ", other_name);
      return *this;
    }
    // The last dimension is dense; rows may be strided.
    Arg& rows() {
      const int64_t last = t_.dim() - 1;
      c_.require(t_.size(last) <= 1 || t_.stride(last) == 1, name_, ".stride(", last, ") is ", t_.stride(last), ", expected 1");
      return *this;
    }
    Arg& contiguous() {
      c_.require(t_.is_contiguous(), name_, "is not contiguous");
      return *this;
    }
    // 16-byte vector access needs the base and every row start aligned.
    Arg& aligned(int64_t bytes, int64_t item_size) {
      const auto base = reinterpret_cast<uintptr_t>(t_.data_ptr());
      c_.require(base % bytes == 0, name_, "starts at an address that is not a multiple of ", bytes, " bytes");
      for (int64_t i = 0; i + 1 < t_.dim(); ++i) {
        c_.require(t_.size(i) <= 1 || t_.stride(i) * item_size % bytes == 0, name_, ".stride(", i, ") is ", t_.stride(i),
                   " elements, expected a multiple of ", bytes / item_size);
      }
      return *this;
    }

   private:
    Check& c_;
    const Tensor& t_;
    const char* name_;
  };

  Arg operator()(const Tensor& t, const char* name) { return Arg(*this, t, name); }
  int64_t operator[](const char* letter) const { return sizes_.at(letter).first; }
  int32_t device() const { return device_; }

 private:
  const char* op_;
  int32_t device_ = -1;
  std::map<std::string, std::pair<int64_t, const char*>> sizes_;
};

inline Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, sizes, dtype);
}

}  // namespace pyllm
