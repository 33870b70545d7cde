//! Emulates cooperative matrices with ordinary arithmetic, for tests on adapters without them. It
//! rewrites the kernel's text and leaves everything but the matrix products unchanged.
//!
//! A 16 x 16 matrix of floats is distributed as devices do it: each of 32 invocations holds eight
//! elements. Products read matrices of halves from workgroup memory and have the precision of
//! halves.

use crate::shader::{MATRIX_KERNELS, expand};
use crate::template::Values;
use samite_core::Result;

/// Returns `source`, the text of the kernel `name`, with cooperative matrices emulated.
///
/// # Errors
/// Returns an error if the template of the emulation is wrong.
pub fn without_matrices(name: &str, source: String) -> Result<String> {
    if !MATRIX_KERNELS.contains(&name) {
        return Ok(source);
    }
    let weights = if source.contains("var<workgroup> weights: array<vec4<f16>") {
        "weights[at][j % 4u]"
    } else {
        "0.0"
    };
    let text = [
        ("enable f16;\n", ""),
        ("enable wgpu_cooperative_matrix;\n", ""),
        (
            "return vec4<f16>(y);",
            "return vec4<f32>(unpack2x16float(pack2x16float(y.xy)), unpack2x16float(pack2x16float(y.zw)));",
        ),
        ("vec4<f16>", "vec4<f32>"),
        (
            "let own_subgroup = place.subgroup;",
            "let own_subgroup = local / 32u;",
        ),
        (
            "let own_lane = place.lane;",
            "let own_lane = local % 32u;\n    emulated_lane = own_lane;",
        ),
        ("coop_mat16x16<f32, C>()", "array<f32, 8>()"),
        ("coopMultiplyAdd(", "emulated_product("),
        (
            "coopLoadT<coop_mat16x16<f16, A>>(&tile_a[",
            "Emulated(0u, true, (",
        ),
        (
            "coopLoadT<coop_mat16x16<f16, A>>(&weights[",
            "Emulated(2u, true, (",
        ),
        (
            "coopLoadT<coop_mat16x16<f16, B>>(&tile_b[",
            "Emulated(1u, true, (",
        ),
        (
            "coopLoad<coop_mat16x16<f16, B>>(&tile_b[",
            "Emulated(1u, false, (",
        ),
        ("], STRIDE)", "), STRIDE)"),
        ("], KEY_STRIDE)", "), KEY_STRIDE)"),
        ("coopStore(", "emulated_store("),
        ("&results[area], 16u", "area"),
    ];
    let changed = text
        .iter()
        .fold(source, |source, (from, to)| source.replace(from, to));
    let values = Values::from([("weight", weights.to_owned())]);
    Ok(changed + &expand(name, "{{>emulated}}", &values)?)
}
