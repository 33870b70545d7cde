//! Assembles the text of a shader: a preamble, one accessor per operand, reductions if they are
//! used, and the kernel.
//!
//! Accessors are templates: `$` stands for the operand's name. [`Shader::source`] replaces other
//! names in capitals with the values in [`Shader::text`].

use crate::grids;
use samite_core::DType;
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
    /// Names and their replacements.
    pub text: Vec<(&'static str, String)>,
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
const OPERAND: &str = include_str!("kernels/types/operand.wgsl");
const GUARDED: &str = include_str!("kernels/types/guarded.wgsl");
const WIDE: &str = include_str!("kernels/types/wide.wgsl");
const FUNCTIONS: &str = include_str!("kernels/functions.wgsl");
const SLOPE: &str = include_str!("kernels/slope.wgsl");
const ROTATION: &str = include_str!("kernels/rotation.wgsl");
const QUANTIZE: &str = include_str!("kernels/q8.wgsl");
const WIDE_FLOATS: &str = include_str!("kernels/types/wide_f32.wgsl");
const WIDE_HALVES: &str = include_str!("kernels/types/wide_f16.wgsl");
const REDUCE_TREE: &str = include_str!("kernels/reduce_tree.wgsl");
const REDUCE_SUBGROUP: &str = include_str!("kernels/reduce_subgroup.wgsl");

/// Kernels by name.
macro_rules! kernels {
    ($($name:literal)*) => {
        const KERNELS: &[(&str, &str)] = &[
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
}

/// Returns the text that reads elements of a type, or `None` if kernels cannot read it.
fn reader(dtype: DType) -> Option<&'static str> {
    macro_rules! readers {
        ($($dtype:ident $file:literal)*) => {
            match dtype {
                $(DType::$dtype => Some(include_str!(concat!("kernels/types/", $file, ".wgsl"))),)*
                _ => codebook_reader(dtype),
            }
        };
    }
    readers! {
        F32 "f32" F16 "f16" BF16 "bf16" I32 "i32" I64 "i64" I16 "i16" I8 "i8"
        Q4_0 "q4_0" Q4_1 "q4_1" Q5_0 "q5_0" Q5_1 "q5_1" Q8_0 "q8_0"
        Q2_K "q2_k" Q3_K "q3_k" Q4_K "q4_k" Q5_K "q5_k" Q6_K "q6_k"
        IQ4_NL "iq4_nl" IQ4_XS "iq4_xs" MXFP4 "mxfp4" NVFP4 "nvfp4" TQ1_0 "tq1_0" TQ2_0 "tq2_0"
        Q1_0 "q1_0" Q2_0 "q2_0"
    }
}

/// Returns the text that reads elements of types whose blocks refer to points of a
/// [grid](crate::grids), or `None` for other types.
fn codebook_reader(dtype: DType) -> Option<&'static str> {
    macro_rules! readers {
        ($($dtype:ident $file:literal $marks:literal)*) => {
            match dtype {
                $(DType::$dtype => Some(concat!(
                    include_str!(concat!("kernels/types/", $file, ".wgsl")),
                    include_str!(concat!("kernels/types/marks_are_", $marks, ".wgsl")),
                    include_str!("kernels/types/codebook.wgsl"),
                )),)*
                _ => None,
            }
        };
    }
    readers! {
        IQ1_S "iq1_s" "shifts" IQ1_M "iq1_m" "shifts"
        IQ2_XXS "iq2_xxs" "signs" IQ2_XS "iq2_xs" "signs" IQ2_S "iq2_s" "signs"
        IQ3_XXS "iq3_xxs" "signs" IQ3_S "iq3_s" "signs"
    }
}

/// Returns the text that reads elements of packed rows, or `None` for types that are not packed.
fn packed_reader(dtype: DType) -> Option<&'static str> {
    // The block headers of Q4_K and Q5_K are the same.
    macro_rules! with_scales {
        ($file:literal) => {
            concat!(
                include_str!("kernels/types/packed_scales.wgsl"),
                include_str!($file)
            )
        };
    }
    Some(match dtype {
        DType::Q4_0 => include_str!("kernels/types/packed_q4_0.wgsl"),
        DType::Q8_0 => include_str!("kernels/types/packed_q8_0.wgsl"),
        DType::Q4_K => with_scales!("kernels/types/packed_q4_k.wgsl"),
        DType::Q5_K => with_scales!("kernels/types/packed_q5_k.wgsl"),
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

    /// Returns whether the kernel also quantizes its result to 8 bits in scratch memory.
    fn quantizes(&self) -> bool {
        let writes = |&(name, _, access): &(char, DType, Access)| name == 'w' && access.writes();
        self.operands.iter().any(writes)
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
    pub fn source(&self) -> String {
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
        for (number, &(name, dtype, access)) in self.operands.iter().enumerate() {
            let binding = self.binding(number);
            let load = match (self.is_atomic(binding), self.is_wide(binding)) {
                (true, _) => "atomicLoad(&buffer_$[i])",
                (_, true) => "buffer_$[i >> 2u][i & 3u]",
                _ => "buffer_$[i]",
            };
            let mut accessor = OPERAND
                .replace("LOAD", load)
                .replace("NUMBER", &number.to_string());
            if access.is_wide() {
                accessor += WIDE;
                accessor += match dtype {
                    DType::F16 => WIDE_HALVES,
                    DType::F32 => WIDE_FLOATS,
                    _ => "",
                };
            }
            if access.reads() {
                accessor += match access {
                    Access::Packed => packed_reader(dtype),
                    _ => reader(dtype),
                }
                .unwrap_or_default();
                accessor += GUARDED;
            }
            if access.writes() {
                accessor += writer(dtype).unwrap_or_default();
            }
            let first_word = grids::first_word(dtype).unwrap_or(0);
            let block = [dtype.block_len(), dtype.block_bytes()].map(|x| x.to_string());
            let accessor = accessor
                .replace("BLOCK_LEN", &block[0])
                .replace("BLOCK_BYTES", &block[1])
                .replace("FIRST_WORD", &first_word.to_string())
                .replace("buffer_$", &format!("buffer_{binding}"))
                .replace('$', &name.to_string());
            source.push_str(&accessor);
        }
        match self.subgroups {
            Some(true) => source.push_str(REDUCE_SUBGROUP),
            Some(false) => source.push_str(REDUCE_TREE),
            None => {}
        }
        let kernel = KERNELS.iter().find(|(name, _)| *name == self.kernel);
        let mut kernel = kernel.map_or("", |(_, text)| text).to_owned();
        let (parameters, names) = match self.subgroups {
            Some(true) => (
                ", @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32, @builtin(num_subgroups) subgroups: u32",
                "Place(local, subgroup, lane, subgroups)",
            ),
            _ => ("", "Place(local)"),
        };
        kernel = kernel
            .replace("PLACE_PARAMETERS", parameters)
            .replace("PLACE", names)
            .replace("FUNCTIONS", FUNCTIONS)
            .replace("SLOPE", SLOPE)
            .replace("ROTATION", ROTATION)
            .replace(
                "QUANTIZE_FUNCTION",
                if self.quantizes() { QUANTIZE } else { "" },
            );
        source.push_str(&kernel);
        for (name, text) in &self.text {
            source = source.replace(name, text);
        }
        unrolled(source)
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

/// Expands `EACH(i, 4) { text }`: repeats the text for each `i` from 0 on and replaces `#i` with
/// the number. This does not depend on compilers to unroll loops, and an array index that is a
/// constant needs no bounds check.
pub fn unrolled(mut source: String) -> String {
    // The last occurrence contains no other.
    while let Some(at) = source.rfind("EACH(") {
        let Some((begin, end)) = braces(&source[at..]) else {
            break; // not valid WGSL; the driver will report it
        };
        let mut head = source[at + 5..at + begin].split([',', ')']).map(str::trim);
        let name = format!("#{}", head.next().unwrap_or_default());
        let product = head.next().unwrap_or_default().split('*');
        let count: usize = product
            .map(|factor| factor.trim().trim_end_matches('u').parse().unwrap_or(0))
            .product();
        let body = &source[at + begin + 1..at + end];
        let all: String = (0..count)
            .map(|i| body.replace(&name, &i.to_string()))
            .collect();
        source.replace_range(at..=at + end, &all);
    }
    source
}

/// Returns the positions of the first pair of braces.
fn braces(text: &str) -> Option<(usize, usize)> {
    let begin = text.find('{')?;
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate().skip(begin) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((begin, at));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shader_loops_are_unrolled() {
        let text = "a EACH(i, 2) { x#i EACH(j, 2*2u) {[#i#j]} }b";
        let expected = "a  x0 [00][01][02][03]  x1 [10][11][12][13] b";
        assert_eq!(unrolled(text.to_owned()), expected);
        assert_eq!(unrolled("EACH(i, 0) { x }".to_owned()), "");
    }
}
