// The table of one instruction set. `L` is a set of lanes; included inside POCKET_TARGET_BEGIN, behind the kernels.
#pragma once

namespace pocket {

template <typename L>
Kernels make_kernels() {
    Kernels table;
    table.prepare = prepare<L>;
    table.product_float32 = product<L, ByColumns<L, Float32Panel<L>>>;
    table.product_float16 = product<L, ByColumns<L, Float16Panel<L>>>;
    table.product_bfloat16 = product<L, ByPairs<L>>;
    table.product_float8 = product<L, ByScaledBlocks<L>>;
    table.finish = finish<L>;
    table.prepare_head = prepare_head<L>;
    table.store_values = store_values<L>;
    table.attend_token = attend_token<L>;
    table.attend_block = attend_block<L>;
    table.gate_attention = gate_attention<L>;
    table.convolve = convolve<L>;
    table.unit_rows = unit_rows<L>;
    table.delta_rule = delta_rule<L>;
    table.gate_norm = gate_norm<L>;
    table.scan_logits = scan_logits<L>;
    return table;
}

}  // namespace pocket
