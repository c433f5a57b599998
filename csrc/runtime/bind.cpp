// Python module pyllm._runtime: the executor's host classes over numpy int32 buffers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bind_file_reader.h"
#include "block_pool.h"
#include "step_packer.h"

namespace py = pybind11;
using namespace py::literals;

namespace pyllm::runtime {
namespace {

// No forcecast: an array of another dtype or layout is a TypeError, never a silent copy.
using Ints = py::array_t<int32_t, py::array::c_style>;

std::span<const int32_t> input(const Ints& a) {
  if (a.ndim() != 1) throw py::type_error("expected a one-dimensional int32 array, got " + std::to_string(a.ndim()) + " dimensions");
  return {a.data(), static_cast<size_t>(a.size())};
}

std::span<int32_t> output(Ints& a) {
  if (a.ndim() != 1) throw py::type_error("expected a one-dimensional int32 array, got " + std::to_string(a.ndim()) + " dimensions");
  return {a.mutable_data(), static_cast<size_t>(a.size())};
}

Ints to_array(const std::vector<int32_t>& v) { return Ints(static_cast<py::ssize_t>(v.size()), v.data()); }

// Keeps the arrays alive for as long as the packer writes to them.
struct BoundPacker {
  std::vector<Ints> keep;
  StepPacker packer;
};

BoundPacker make_packer(Ints ids, Ints positions, Ints slots, Ints q_starts, Ints kv_lens, Ints page_table, Ints logit_rows,
                        int64_t page_size, int64_t pages, int64_t vocab) {
  const StepBuffers buffers{output(ids),     output(positions),  output(slots),     output(q_starts),
                            output(kv_lens), output(page_table), output(logit_rows)};
  return {{ids, positions, slots, q_starts, kv_lens, page_table, logit_rows}, StepPacker(buffers, page_size, pages, vocab)};
}

}  // namespace
}  // namespace pyllm::runtime

PYBIND11_MODULE(_runtime, m) {
  using namespace pyllm::runtime;
  m.doc() = "Host side of the executor: page allocator, step packer, file reader.";
  bind_file_reader(m);

  py::class_<BlockPool>(m, "BlockPool", "Allocator of KV pages; page 0 is the dummy page and is never handed out.")
      .def(py::init<int64_t>(), "pages"_a)
      .def(
          "allocate", [](BlockPool& p, int64_t count) { return to_array(p.allocate(count)); }, "count"_a)
      .def(
          "ref", [](BlockPool& p, const Ints& pages) { p.ref(input(pages)); }, py::arg("pages").noconvert())
      .def(
          "free", [](BlockPool& p, const Ints& pages) { p.free(input(pages)); }, py::arg("pages").noconvert())
      .def(
          "match", [](BlockPool& p, const py::bytes& keys) { return to_array(p.match(std::string_view(keys))); }, "keys"_a)
      .def(
          "cache",
          [](BlockPool& p, const py::bytes& keys, const Ints& pages, const std::optional<Ints>& priorities) {
            return p.cache(std::string_view(keys), input(pages), priorities ? input(*priorities) : std::span<const int32_t>());
          },
          "keys"_a, py::arg("pages").noconvert(), py::arg("priorities").noconvert() = py::none())
      .def("forget", &BlockPool::forget)
      .def("ref_count", &BlockPool::ref_count, "page"_a)
      .def("check", &BlockPool::check)
      .def_property_readonly("free_pages", &BlockPool::free_pages)
      .def_property_readonly("cached", &BlockPool::cached)
      .def_property_readonly("total", &BlockPool::total)
      .def_property_readonly("available", &BlockPool::available)
      .def_property_readonly("used", &BlockPool::used);

  py::class_<BoundPacker>(m, "StepPacker", "Packs one ragged step into the caller's int32 arrays.")
      .def(py::init(&make_packer), py::arg("ids").noconvert(), py::arg("positions").noconvert(), py::arg("slots").noconvert(),
           py::arg("q_starts").noconvert(), py::arg("kv_lens").noconvert(), py::arg("page_table").noconvert(),
           py::arg("logit_rows").noconvert(), py::kw_only(), "page_size"_a, "pages"_a, "vocab"_a)
      .def(
          "begin", [](BoundPacker& b, int64_t width) { b.packer.begin(width); }, "width"_a)
      .def(
          "add",
          [](BoundPacker& b, const Ints& tokens, int64_t start, const Ints& pages, int64_t rows) {
            b.packer.add(input(tokens), start, input(pages), rows);
          },
          py::arg("tokens").noconvert(), "start"_a, py::arg("pages").noconvert(), "rows"_a)
      .def_property_readonly("tokens", [](const BoundPacker& b) { return b.packer.tokens(); })
      .def_property_readonly("sequences", [](const BoundPacker& b) { return b.packer.sequences(); })
      .def_property_readonly("rows", [](const BoundPacker& b) { return b.packer.rows(); });
}
