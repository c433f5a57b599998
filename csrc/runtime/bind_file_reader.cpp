// pyllm._runtime.FileReader.
#include "bind_file_reader.h"

#include <system_error>

#include "file_reader.h"

namespace py = pybind11;
using namespace py::literals;

namespace pyllm::runtime {
namespace {

int64_t read(FileReader& reader, int descriptor, int64_t begin, const py::buffer& out) {
  const py::buffer_info info = out.request(true);
  if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1) throw py::type_error("out: expected a flat buffer of bytes");
  const std::span bytes(static_cast<char*>(info.ptr), static_cast<size_t>(info.size));
  try {
    const py::gil_scoped_release others_run;
    return reader.read(descriptor, begin, bytes);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

}  // namespace

void bind_file_reader(py::module_& m) {
  py::class_<FileReader>(m, "FileReader", "Reads a range of a file by several threads at a time.")
      .def(py::init<int64_t>(), "threads"_a)
      .def("read", &read, "descriptor"_a, "begin"_a, "out"_a);
}

}  // namespace pyllm::runtime
