#pragma once
#include <pybind11/pybind11.h>

namespace pyllm::runtime {

void bind_file_reader(pybind11::module_& m);

}  // namespace pyllm::runtime
