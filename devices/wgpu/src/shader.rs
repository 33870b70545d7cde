//! Assembles the text of a shader: a preamble, one accessor per operand, reductions if they are
//! used, and the kernel. All are [templates](crate::template).

use crate::grids;
use crate::template::{self, Values};
use samite_core::{DType, Result};
use std::fmt::Write;

/// Access of a kernel to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    Read,
    /// Reads four words at once, at multiples of 16 bytes.
    Wide,
    /// Like `Wide`, for rows that are [packed](crate::packed).
    Packed,
    Write,
    /// Reads an element before the same invocation writes it.
    Update,
}

impl Access {
    pub fn reads(self) -> bool {
        self != Access::Write
    }

    pub fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Update)
    }

    /// Returns whether the binding is an array of vectors of four words.
    pub fn is_wide(self) -> bool {
        matches!(self, Access::Wide | Access::Packed)
    }
}

/// Key of a shader: everything that determines its text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shader {
    /// File name of the kernel.
    pub kernel: &'static str,
    /// Names, types and accesses of operands, in order.
    pub operands: Vec<(char, DType, Access)>,
    /// Values of the kernel's template.
    pub values: Values,
    /// Binding of each operand if some share one; empty if each has its own.
    pub bindings: Vec<u8>,
    /// Set if the kernel reduces; true if reductions use subgroups.
    pub subgroups: Option<bool>,
}

/// Binding of the first operand, after the parameters and the failure word.
pub const FIRST_OPERAND: u32 = 2;

/// Kernels that use cooperative matrices.
pub const MATRICES: &str = "mul_mat_matrices";
pub const ATTENTION_MATRICES: &str = "flash_attn_matrices";
pub const MATRIX_KERNELS: [&str; 2] = [MATRICES, ATTENTION_MATRICES];

const PREAMBLE: &str = include_str!("kernels/preamble.wgsl");

/// Kernels and other pieces of WGSL by name.
macro_rules! kernels {
    ($($name:literal)*) => {
        const PIECES: &[(&str, &str)] = &[
            $(($name, include_str!(concat!("kernels/", $name, ".wgsl"))),)*
        ];
    };
}

kernels! {
    "elementwise" "move" "cast" "encode" "add_id"
    "get_rows" "set_rows" "get_rows_back"
    "rows" "cumsum" "norm" "row_gradient" "soft_max" "rope" "rope_store" "norm_rope"
    "argmax" "sort" "top_k"
    "mul_mat_vec" "mul_mat_q8" "quantize" "scaled_norm" "gated_q8"
    "mul_mat" "mul_mat_matrices" "mul_mat_id" "expert_lists" "out_prod"
    "flash_attn" "flash_attn_tiles" "flash_attn_matrices" "flash_attn_combine"
    "flash_attn_back_queries" "flash_attn_back_keys"
    "ssm_conv" "ssm_scan" "gated_delta_net"
    "repeat_back" "cross_entropy" "cross_entropy_back" "adamw" "sgd"
    "limits" "emulated"

    "reduce_subgroup" "reduce_tree" "functions" "slope" "rotation" "q8" "scaled_norm_sums"
    "mul_mat_batches" "mul_mat_experts" "mul_mat_q8_matrix"
    "mul_mat_pieces" "mul_mat_packed_pieces" "mul_mat_packed_halves"
    "flash_attn_any" "flash_attn_wide" "flash_attn_tiles_any" "flash_attn_tiles_wide"
    "flash_attn_finish" "flash_attn_leave" "flash_attn_q8"
    "norm_rope_head" "norm_rope_plain_head" "norm_rope_store" "norm_rope_keys"
    "norm_rope_key_blocks" "norm_rope_value_block"

    "types/operand" "types/guarded" "types/wide" "types/wide_f32" "types/wide_f16"
    "types/get" "types/load32" "types/store_half" "types/store_own_half"
    "types/codebook" "types/marks_are_shifts" "types/marks_are_signs" "types/packed_scales"
}

/// Expands `text`, the template of `kernel`.
///
/// # Errors
/// Returns an error if the names in the template are not those of `values`.
pub fn expand(kernel: &str, text: &str, values: &Values) -> Result<String> {
    template::expand(kernel, text, values, |name| {
        let piece = PIECES.iter().find(|(piece, _)| *piece == name);
        piece.map(|(_, text)| *text)
    })
}

/// Returns the text that reads elements of a type, or `None` if kernels cannot read it.
fn reader(dtype: DType) -> Option<&'static str> {
    macro_rules! readers {
        ($($dtype:ident $file:literal)*) => {
            match dtype {
                $(DType::$dtype => Some(include_str!(concat!("kernels/types/", $file, ".wgsl"))),)*
                _ => None,
            }
        };
    }
    readers! {
        F32 "f32" F16 "f16" BF16 "bf16" I32 "i32" I64 "i64" I16 "i16" I8 "i8"
        Q4_0 "q4_0" Q4_1 "q4_1" Q5_0 "q5_0" Q5_1 "q5_1" Q8_0 "q8_0"
        Q2_K "q2_k" Q3_K "q3_k" Q4_K "q4_k" Q5_K "q5_k" Q6_K "q6_k"
        IQ4_NL "iq4_nl" IQ4_XS "iq4_xs" MXFP4 "mxfp4" NVFP4 "nvfp4" TQ1_0 "tq1_0" TQ2_0 "tq2_0"
        Q1_0 "q1_0" Q2_0 "q2_0"
        IQ1_S "iq1_s" IQ1_M "iq1_m" IQ2_XXS "iq2_xxs" IQ2_XS "iq2_xs" IQ2_S "iq2_s"
        IQ3_XXS "iq3_xxs" IQ3_S "iq3_s"
    }
}

/// Returns the text that reads elements of packed rows, or `None` for types that are not packed.
fn packed_reader(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::Q4_0 => include_str!("kernels/types/packed_q4_0.wgsl"),
        DType::Q8_0 => include_str!("kernels/types/packed_q8_0.wgsl"),
        DType::Q4_K => include_str!("kernels/types/packed_q4_k.wgsl"),
        DType::Q5_K => include_str!("kernels/types/packed_q5_k.wgsl"),
        DType::Q6_K => include_str!("kernels/types/packed_q6_k.wgsl"),
        _ => return None,
    })
}

/// Returns the text that writes elements or whole blocks of a type, or `None` if kernels cannot
/// write it.
fn writer(dtype: DType) -> Option<&'static str> {
    macro_rules! writers {
        ($($dtype:ident $file:literal)*) => {
            match dtype {
                $(DType::$dtype => Some(include_str!(concat!("kernels/types/store_", $file,
                    ".wgsl"))),)*
                _ => None,
            }
        };
    }
    writers! {
        F32 "f32" F16 "f16" BF16 "bf16" I32 "i32" I64 "i64" I16 "i16" I8 "i8"
        Q4_0 "q4_0" Q4_1 "q4_1" Q5_0 "q5_0" Q5_1 "q5_1" Q8_0 "q8_0" IQ4_NL "iq4_nl"
    }
}

/// Returns whether kernels can read elements of this type.
pub fn is_readable(dtype: DType) -> bool {
    reader(dtype).is_some()
}

/// Returns whether kernels can write elements or blocks of this type.
pub fn is_writable(dtype: DType) -> bool {
    writer(dtype).is_some()
}

/// Returns whether several elements share a word, so that writes must be atomic.
fn shares_words(dtype: DType) -> bool {
    !dtype.block_bytes().is_multiple_of(4)
}

impl Shader {
    /// Returns whether the kernel reads the grids of IQ types. They are bound after the operands.
    pub fn reads_grids(&self) -> bool {
        let reads = |&(_, dtype, access): &(char, DType, Access)| {
            access.reads() && grids::first_word(dtype).is_some()
        };
        self.operands.iter().any(reads)
    }

    /// Returns the number of bindings of the operands.
    pub fn binding_count(&self) -> usize {
        match self.bindings.iter().max() {
            Some(&last) => usize::from(last) + 1,
            None => self.operands.len(),
        }
    }

    /// Returns the binding of operand `number`.
    fn binding(&self, number: usize) -> usize {
        self.bindings
            .get(number)
            .map_or(number, |&binding| binding.into())
    }

    /// Returns whether the kernel writes the words of a binding with atomic operations.
    fn is_atomic(&self, binding: usize) -> bool {
        let writes =
            |&(_, dtype, access): &(char, DType, Access)| access.writes() && shares_words(dtype);
        let mut operands = self.operands.iter().enumerate();
        operands.any(|(number, operand)| self.binding(number) == binding && writes(operand))
    }

    /// Returns whether a binding is an array of vectors of four words.
    fn is_wide(&self, binding: usize) -> bool {
        let mut operands = self.operands.iter().enumerate();
        operands
            .any(|(number, &(_, _, access))| self.binding(number) == binding && access.is_wide())
    }

    /// Returns whether all operands that share a binding access it in the same way.
    pub fn can_share(&self) -> bool {
        self.operands
            .iter()
            .enumerate()
            .all(|(number, &(_, dtype, access))| {
                let binding = self.binding(number);
                !access.writes()
                    || shares_words(dtype) == self.is_atomic(binding) && !self.is_wide(binding)
            })
    }

    /// Returns the text in WGSL.
    ///
    /// # Errors
    /// Returns an error if the names in a template are not those of its values.
    pub fn source(&self) -> Result<String> {
        let mut source = if MATRIX_KERNELS.contains(&self.kernel) {
            "enable f16;\nenable wgpu_cooperative_matrix;\n".to_owned() + PREAMBLE
        } else {
            PREAMBLE.to_owned()
        };
        for binding in 0..self.binding_count() {
            let element = match (self.is_atomic(binding), self.is_wide(binding)) {
                (true, _) => "atomic<u32>",
                (_, true) => "vec4<u32>",
                _ => "u32",
            };
            let _ = writeln!(
                source,
                "@group(0) @binding({}) var<storage, read_write> buffer_{binding}: array<{element}>;",
                binding as u32 + FIRST_OPERAND
            ); // writing to a string cannot fail
        }
        if self.reads_grids() {
            let _ = writeln!(
                source,
                "@group(0) @binding({}) var<storage, read> grids: array<u32>;",
                self.binding_count() as u32 + FIRST_OPERAND
            ); // writing to a string cannot fail
        }
        for number in 0..self.operands.len() {
            source += &self.accessor(number)?;
        }
        let mut values = self.values.clone();
        let reductions = match self.subgroups {
            None => "",
            Some(true) => {
                let parameters = ", @builtin(subgroup_id) subgroup: u32, \
                    @builtin(subgroup_invocation_id) lane: u32, \
                    @builtin(num_subgroups) subgroups: u32";
                values.insert("place_parameters", parameters.to_owned());
                values.insert(
                    "place",
                    "Place(local, subgroup, lane, subgroups)".to_owned(),
                );
                "{{>reduce_subgroup}}"
            }
            Some(false) => {
                values.insert("place_parameters", String::new());
                values.insert("place", "Place(local)".to_owned());
                "{{>reduce_tree}}"
            }
        };
        let text = format!("{reductions}{{{{>{}}}}}", self.kernel);
        Ok(source + &expand(self.kernel, &text, &values)?)
    }

    /// Returns the functions that access operand `number`.
    fn accessor(&self, number: usize) -> Result<String> {
        let (name, dtype, access) = self.operands[number];
        let binding = self.binding(number);
        let load = match (self.is_atomic(binding), self.is_wide(binding)) {
            (true, _) => "atomicLoad(&{{buffer}}[i])",
            (_, true) => "{{buffer}}[i >> 2u][i & 3u]",
            _ => "{{buffer}}[i]",
        };
        let mut values = Values::from([
            ("name", name.to_string()),
            ("number", number.to_string()),
            ("buffer", format!("buffer_{binding}")),
            ("load", load.to_owned()),
        ]);
        let mut text = "{{>types/operand}}".to_owned();
        if access.is_wide() {
            text += "{{>types/wide}}";
            text += match dtype {
                DType::F16 => "{{>types/wide_f16}}",
                DType::F32 => "{{>types/wide_f32}}",
                _ => "",
            };
        }
        if access.reads() {
            let is_packed = access == Access::Packed;
            let reader = if is_packed {
                packed_reader(dtype)
            } else {
                reader(dtype)
            };
            text = text + reader.unwrap_or_default() + "{{>types/guarded}}";
            if dtype.is_quantized() && !is_packed {
                values.insert("block_bytes", dtype.block_bytes().to_string());
            }
            if let Some(word) = grids::first_word(dtype) {
                values.insert("first_word", word.to_string());
            }
        }
        if access.writes() {
            text += writer(dtype).unwrap_or_default();
        }
        expand(self.kernel, &text, &values)
    }

    /// Returns a name for logs and errors.
    pub fn name(&self) -> String {
        let mut name = self.kernel.to_owned();
        for (operand, dtype, access) in &self.operands {
            let packed = if *access == Access::Packed {
                " packed"
            } else {
                ""
            };
            let _ = write!(name, " {operand}:{dtype}{packed}"); // writing to a string cannot fail
        }
        name
    }
}
