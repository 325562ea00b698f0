// Products, embeddings and loading of weights, on every device.
#include <limits>
#include <utility>

#include "ops_devices.h"
#include "pocket/error.h"
#include "reference_ops.h"
#include "tests/check.h"

using namespace pocket;
using namespace pocket::ops;

namespace {

struct PartSpec {
    std::int64_t rows;
    DType file_dtype;
};

// A weight of parts and what its numbers are once they are loaded.
struct Weight {
    std::vector<std::unique_ptr<HostWeight>> tensors;
    std::vector<MatrixPart> parts;
    std::vector<float> values;       // [rows, columns]
    std::vector<bool> rounds_to_half;  // a row's x is rounded to bfloat16
    std::int64_t rows = 0, columns;

    Weight(Random& random, const std::vector<PartSpec>& specs, std::int64_t columns_, DType dtype) : columns(columns_) {
        for (const PartSpec& spec : specs) {
            std::vector<float> part = random.values(static_cast<std::size_t>(spec.rows * columns), 0.5);
            tensors.push_back(std::make_unique<HostWeight>("layer.weight", part, spec.rows, columns, spec.file_dtype));
            const HostWeight* scales = nullptr;
            part = rounded(part, spec.file_dtype);
            if (spec.file_dtype == DType::float8_e4m3) {
                const std::int64_t blocks = (columns + 127) / 128, row_blocks = (spec.rows + 127) / 128;
                const DType scale_dtype = spec.rows % 2 ? DType::float32 : DType::bfloat16;
                const std::vector<float> numbers = rounded(random.values(static_cast<std::size_t>(row_blocks * blocks), 2.0), scale_dtype);
                tensors.push_back(std::make_unique<HostWeight>("layer.weight_scale_inv", numbers, row_blocks, blocks, scale_dtype));
                scales = tensors.back().get();
                for (std::int64_t row = 0; row < spec.rows; ++row)
                    for (std::int64_t column = 0; column < columns; ++column)
                        part[static_cast<std::size_t>(row * columns + column)] *= numbers[static_cast<std::size_t>(row / 128 * blocks + column / 128)];
            } else {
                part = rounded(part, dtype);
            }
            parts.push_back({&tensors[tensors.size() - (scales ? 2 : 1)]->tensor, scales ? &scales->tensor : nullptr});
            values.insert(values.end(), part.begin(), part.end());
            rounds_to_half.insert(rounds_to_half.end(), static_cast<std::size_t>(spec.rows), spec.file_dtype == DType::float8_e4m3 || dtype == DType::bfloat16);
            rows += spec.rows;
        }
    }
};

void check_product(Device& device, const std::string& where, Random& random, const std::vector<PartSpec>& specs, std::int64_t columns, DType dtype,
                   std::int64_t rows, Epilogue epilogue, bool with_norm, bool is_aligned = false) {
    const Weight weight(random, specs, columns, dtype);
    const std::unique_ptr<Matrix> loaded = device.load_matrix(weight.parts, dtype);
    CHECK_EQ(loaded->rows(), weight.rows);
    CHECK_EQ(loaded->columns(), columns);
    const std::int64_t wide = epilogue == Epilogue::swiglu ? weight.rows / 2 : weight.rows, stride = columns + (is_aligned ? 8 : 3), out_stride = wide + (is_aligned ? 8 : 5);
    const std::vector<float> x = random.values(static_cast<std::size_t>(rows * stride), 2.0), norm_weight = random.values(static_cast<std::size_t>(columns)),
                             before = random.values(static_cast<std::size_t>(rows * out_stride));
    const Array on_device(device, x), norm_array(device, norm_weight), out(device, before);
    const Norm norm{norm_array.floats(), 1e-6f};
    device.reserve(static_cast<int>(rows), static_cast<int>(rows));
    device.linear({on_device.data(), DType::float32, rows, columns, stride}, with_norm ? &norm : nullptr, *loaded, epilogue,
                  {out.data(), DType::float32, rows, wide, out_stride});
    device.synchronize();
    const std::vector<float> found = out.values();

    const double near = tolerance(device);
    const std::int64_t stretch = 1 + rows * columns * wide / 200000;  // of large products only some numbers are looked at
    for (std::int64_t row = 0; row < rows; ++row) {
        reference::Vector own = reference::slice(x, static_cast<std::size_t>(row * stride), static_cast<std::size_t>(columns));
        if (with_norm) own = reference::norm(own, norm_weight, 1e-6);
        reference::Vector halves = own;  // as products with bfloat16 weights read it
        for (double& value : halves) value = from_bfloat16(to_bfloat16(static_cast<float>(value)));
        const auto sums = [&](std::int64_t n) {  // of the products, and of their sizes
            std::pair<double, double> both;
            const float* weights = weight.values.data() + n * columns;
            const double* numbers = weight.rounds_to_half[static_cast<std::size_t>(n)] ? halves.data() : own.data();
            for (std::int64_t k = 0; k < columns; ++k) {
                both.first += numbers[k] * weights[k];
                both.second += std::abs(numbers[k] * weights[k]);
            }
            return both;
        };
        for (std::int64_t column = 0; column < out_stride; ++column) {
            const std::size_t at = static_cast<std::size_t>(row * out_stride + column);
            if (column >= wide) {
                CHECK_EQ(found[at], before[at]);
                continue;
            }
            if ((column + row) % stretch != 0) continue;
            const auto [product, size] = sums(column);
            double wanted = product, allowed = size;
            if (epilogue == Epilogue::add) wanted += before[at];
            if (epilogue == Epilogue::swiglu) {
                const auto [up, up_size] = sums(wide + column);
                wanted = reference::silu(product) * up;
                allowed = (size + 1) * (std::abs(up) + 1) + up_size * (std::abs(product) + 1);
            }
            // A norm in float32 may round a number to the other neighbour in bfloat16.
            const double slack = with_norm && weight.rounds_to_half[static_cast<std::size_t>(column)] ? 40 * near : near;
            if (!(std::abs(found[at] - wanted) <= slack * (allowed + 1))) {
                check::fail(__FILE__, __LINE__,
                            where + ": product [" + std::to_string(rows) + ", " + std::to_string(columns) + "] with " + name(dtype) + " [" +
                                std::to_string(weight.rows) + "], epilogue " + std::to_string(static_cast<int>(epilogue)) + (with_norm ? ", normed" : "") +
                                ": " + std::to_string(found[at]) + " at [" + std::to_string(row) + ", " + std::to_string(column) + "] is not " +
                                std::to_string(wanted));
                return;
            }
        }
    }
}

}  // namespace

TEST(many_rows_that_are_aligned) {
    on_every_device([](Device& device, const std::string& where) {
        Random random(3);
        for (const DType dtype : {DType::float16, DType::bfloat16, DType::float8_e4m3}) {
            const DType dense = dtype == DType::float8_e4m3 ? DType::bfloat16 : dtype;
            for (const Epilogue epilogue : {Epilogue::store, Epilogue::add, Epilogue::swiglu})
                check_product(device, where, random, {{256, dtype}, {128, dtype}, {128, dtype}}, 512, dense, 259, epilogue, epilogue != Epilogue::add, true);
        }
    });
}

TEST(products_of_every_type) {
    on_every_device([](Device& device, const std::string& where) {
        Random random(1);
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
            for (const std::int64_t rows : {1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 70}) {
                const Epilogue epilogue = static_cast<Epilogue>(random.below(3));
                const std::int64_t columns = 8 * (1 + random.below(40)), outputs = 2 * (1 + random.below(60));
                check_product(device, where, random, {{outputs, dtype}}, columns, dtype, rows, epilogue, random.below(2) == 0);
            }
        }
    });
}

TEST(products_of_float8_blocks) {
    on_every_device([](Device& device, const std::string& where) {
        Random random(2);
        for (const std::int64_t rows : {1, 2, 4, 7, 16, 20, 40, 67}) {
            check_product(device, where, random, {{130, DType::float8_e4m3}, {61, DType::float8_e4m3}}, 328, DType::bfloat16, rows, Epilogue::store,
                          rows % 2 == 0);
            check_product(device, where, random, {{32, DType::float8_e4m3}, {32, DType::float8_e4m3}}, 128, DType::bfloat16, rows, Epilogue::swiglu, false);
        }
    });
}

TEST(parts_of_different_types_are_one_matrix) {
    on_every_device([](Device& device, const std::string& where) {
        Random random(3);
        for (const std::int64_t rows : {1, 6, 40}) {
            check_product(device, where, random, {{20, DType::float8_e4m3}, {17, DType::bfloat16}, {3, DType::float32}, {8, DType::float8_e4m3}}, 160,
                          DType::bfloat16, rows, Epilogue::add, true);
            check_product(device, where, random, {{24, DType::bfloat16}, {24, DType::float16}}, 72, DType::float32, rows, Epilogue::swiglu, false);
            check_product(device, where, random, {{16, DType::float8_e4m3}, {16, DType::bfloat16}}, 72, DType::bfloat16, rows, Epilogue::swiglu, false);
        }
    });
}

TEST(wide_products) {
    on_every_device([](Device& device, const std::string& where) {
        Random random(4);
        for (const std::int64_t rows : {1, 9, 48, 130})
            check_product(device, where, random, {{352, DType::bfloat16}}, 1056, DType::bfloat16, rows, Epilogue::store, true);
        for (const std::int64_t rows : {1, 9, 48, 130})
            check_product(device, where, random, {{352, DType::bfloat16}}, 1056, DType::bfloat16, rows, Epilogue::swiglu, false);
        for (const DType dtype : {DType::bfloat16, DType::float8_e4m3})
            check_product(device, where, random, {{300, dtype}}, 2344, DType::bfloat16, 530, Epilogue::add, false);
    });
}

TEST(a_row_is_the_same_in_every_batch) {
    on_every_device([](Device& device, const std::string& where) {
        Random random(5);
        constexpr std::int64_t columns = 264, outputs = 72, most = 80;
        const Weight weight(random, {{outputs, DType::bfloat16}}, columns, DType::bfloat16);
        const std::unique_ptr<Matrix> loaded = device.load_matrix(weight.parts, DType::bfloat16);
        const Array x(device, random.values(columns * most)), out(device, std::vector<float>(outputs * most));
        std::vector<float> alone;
        for (const std::int64_t rows : {1, 2, 7, 16, 33, 80}) {
            device.linear(matrix(x, rows, columns), nullptr, *loaded, Epilogue::store, matrix(out, rows, outputs));
            device.synchronize();
            const std::vector<float> found = out.values();
            if (rows == 1) alone = found;
            for (std::size_t i = 0; i < outputs; ++i)
                if (std::abs(found[i] - alone[i]) > 1e-4)
                    check::fail(__FILE__, __LINE__, where + ": the first of " + std::to_string(rows) + " rows differs from it alone");
        }
    });
}

TEST(embeddings_and_samples_are_rows) {
    on_every_device([](Device& device, const std::string&) {
        Random random(6);
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::float8_e4m3}) {
            const std::int64_t columns = 136, rows = 50;
            const Weight weight(random, {{rows, dtype}}, columns, dtype == DType::float8_e4m3 ? DType::bfloat16 : dtype);
            const std::unique_ptr<Matrix> loaded = device.load_matrix(weight.parts, dtype == DType::float8_e4m3 ? DType::bfloat16 : dtype);
            const std::vector<std::int32_t> ids = {49, 0, 17, 17, 31, 16};
            const Array tokens(device, ids), out(device, std::vector<float>(ids.size() * columns)), wanted(device, std::vector<std::int32_t>{1, 5}),
                taken(device, std::vector<float>(2 * columns));
            Step step;
            step.num_tokens = static_cast<int>(ids.size());
            step.token_ids = tokens.ints();
            step.num_samples = 2;
            step.sample_tokens = wanted.ints();
            device.embed(step, *loaded, matrix(out, step.num_tokens, columns));
            device.take_samples(step, matrix(out, step.num_tokens, columns), matrix(taken, 2, columns));
            device.synchronize();
            const std::vector<float> found = out.values(), samples = taken.values();
            for (std::size_t i = 0; i < ids.size(); ++i)
                for (std::size_t k = 0; k < columns; ++k) CHECK_EQ(found[i * columns + k], weight.values[static_cast<std::size_t>(ids[i]) * columns + k]);
            for (std::size_t k = 0; k < columns; ++k) CHECK_EQ(samples[k], weight.values[k]);
            for (std::size_t k = 0; k < columns; ++k) CHECK_EQ(samples[columns + k], weight.values[16 * columns + k]);
        }
    });
}

TEST(broken_weights_are_refused_by_name) {
    on_every_device([](Device& device, const std::string&) {
        std::vector<float> values(40 * 24, 0.5f);
        values[33 * 24 + 7] = std::numeric_limits<float>::quiet_NaN();
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16, DType::float8_e4m3}) {
            const HostWeight weight("layers.3.weight", values, 40, 24, dtype), scales("layers.3.weight_scale_inv", {1.0f}, 1, 1, DType::float32);
            const std::vector<MatrixPart> parts = {{&weight.tensor, &scales.tensor}};
            CHECK_THROWS(device.load_matrix(parts, DType::bfloat16), "model.safetensors: layers.3.weight has a value that is NaN or infinite at [33, 7]");
        }
        values[33 * 24 + 7] = std::numeric_limits<float>::infinity();
        const HostWeight infinite("layers.3.weight", values, 40, 24, DType::bfloat16);
        CHECK_THROWS(device.load_matrix(std::vector<MatrixPart>{{&infinite.tensor, nullptr}}, DType::float32), "NaN or infinite at [33, 7]");
        values[33 * 24 + 7] = 1e6f;
        const HostWeight large("layers.3.weight", values, 40, 24, DType::bfloat16), narrow("layers.4.weight", std::vector<float>(16), 2, 8, DType::bfloat16);
        CHECK_THROWS(device.load_matrix(std::vector<MatrixPart>{{&large.tensor, nullptr}}, DType::float16), "too large for float16");
        CHECK_THROWS(device.load_matrix(std::vector<MatrixPart>{{&large.tensor, nullptr}, {&narrow.tensor, nullptr}}, DType::bfloat16),
                     "layers.4.weight has 8 columns");
        values[33 * 24 + 7] = 1.0f;
        const HostWeight eight("layers.5.weight", values, 40, 24, DType::float8_e4m3), wrong("layers.5.weight_scale_inv", {1.0f, 1.0f}, 2, 1, DType::float32),
            bad("layers.5.weight_scale_inv", {NAN}, 1, 1, DType::float32);
        CHECK_THROWS(device.load_matrix(std::vector<MatrixPart>{{&eight.tensor, nullptr}}, DType::bfloat16), "weight_scale_inv is missing");
        CHECK_THROWS(device.load_matrix(std::vector<MatrixPart>{{&eight.tensor, &wrong.tensor}}, DType::bfloat16), "layers.5.weight_scale_inv is not [1, 1]");
        CHECK_THROWS(device.load_matrix(std::vector<MatrixPart>{{&eight.tensor, &bad.tensor}}, DType::bfloat16), "NaN or infinite");
    });
}

TEST(memory_that_is_not_there_is_refused_with_figures) {
    on_every_device([](Device& device, const std::string&) {
        CHECK_THROWS(device.allocate(std::size_t{1} << 46), "67108864 MiB");
        const std::unique_ptr<Buffer> buffer = device.allocate(5 << 20);
        CHECK_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 64, 0u);
    });
}
