//! Modules of kernels as PTX, compiled from `kernels/` by `kernels/build`.

use std::fmt;

/// A module: the PTX of one source with one set of definitions.
#[derive(PartialEq, Eq)]
pub struct Module {
    /// Name, as in `kernels/modules.txt`.
    pub name: &'static str,
    /// A gzip file.
    file: &'static [u8],
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({})", self.name)
    }
}

/// Bytes before and after the compressed text of a gzip file without a name.
const GZIP_HEADER: usize = 10;
const GZIP_TRAILER: usize = 8;

/// End of the names of modules for compute capability 9.0 and later. Their kernels start while
/// those before them end.
const EARLY: &str = "_sm90";

impl Module {
    /// Returns the module with the same kernels for a compute capability.
    pub fn for_capability(&'static self, capability: u32) -> &'static Module {
        let early = find(&format!("{}{EARLY}", self.name));
        early.filter(|_| capability >= 90).unwrap_or(self)
    }

    /// Returns whether the kernels wait themselves for those before them.
    pub fn starts_early(&self) -> bool {
        self.name.ends_with(EARLY)
    }

    /// Returns the PTX.
    ///
    /// # Errors
    /// If the file in the program is damaged.
    pub fn ptx(&self) -> Result<String, String> {
        let end = self.file.len().saturating_sub(GZIP_TRAILER);
        let compressed = self.file.get(GZIP_HEADER..end).unwrap_or_default();
        let text = miniz_oxide::inflate::decompress_to_vec(compressed).ok();
        let text = text.and_then(|text| String::from_utf8(text).ok());
        text.ok_or_else(|| format!("the kernels in module {} are damaged", self.name))
    }
}

macro_rules! modules {
    ($($name:literal),* $(,)?) => {
        /// Every module, by name.
        pub const MODULES: &[Module] = &[
            $(Module { name: $name, file: include_bytes!(concat!("../ptx/", $name, ".ptx.gz")) },)*
        ];
    };
}

modules![
    "attention",
    "attention_sm90",
    "blocks_bf16",
    "blocks_f16",
    "blocks_f8_e4m3",
    "blocks_iq1_m",
    "blocks_iq1_s",
    "blocks_iq2_s",
    "blocks_iq2_xs",
    "blocks_iq2_xxs",
    "blocks_iq3_s",
    "blocks_iq3_xxs",
    "blocks_iq4_nl",
    "blocks_iq4_xs",
    "blocks_mxfp4",
    "blocks_nvfp4",
    "blocks_q1_0",
    "blocks_q2_0",
    "blocks_q2_k",
    "blocks_q3_k",
    "blocks_q4_0",
    "blocks_q4_1",
    "blocks_q4_k",
    "blocks_q5_0",
    "blocks_q5_1",
    "blocks_q5_k",
    "blocks_q6_k",
    "blocks_q8_0",
    "blocks_tq1_0",
    "blocks_tq2_0",
    "copies",
    "copy_blocks",
    "elementwise",
    "elementwise_sm90",
    "experts",
    "flash_attn_bf16",
    "flash_attn_bf16_sm90",
    "flash_attn_f16",
    "flash_attn_f16_sm90",
    "flash_attn_f32",
    "flash_attn_f32_sm90",
    "flash_attn_mma_f16",
    "flash_attn_mma_q4_0",
    "flash_attn_mma_q8_0",
    "flash_attn_q4_0",
    "flash_attn_q4_0_sm90",
    "flash_attn_q8_0",
    "flash_attn_q8_0_sm90",
    "get_rows_packed_q4_0",
    "get_rows_packed_q4_k",
    "get_rows_packed_q5_k",
    "get_rows_packed_q6_k",
    "get_rows_packed_q8_0",
    "halves",
    "mul_mat_bf16",
    "mul_mat_f16",
    "mul_mat_f32",
    "mul_mat_f8_e4m3",
    "mul_mat_int8_q4_0",
    "mul_mat_int8_q4_0_sm90",
    "mul_mat_int8_q4_k",
    "mul_mat_int8_q4_k_sm90",
    "mul_mat_int8_q5_k",
    "mul_mat_int8_q5_k_sm90",
    "mul_mat_int8_q6_k",
    "mul_mat_int8_q6_k_sm90",
    "mul_mat_int8_q8_0",
    "mul_mat_int8_q8_0_sm90",
    "mul_mat_iq1_m",
    "mul_mat_iq1_s",
    "mul_mat_iq2_s",
    "mul_mat_iq2_xs",
    "mul_mat_iq2_xxs",
    "mul_mat_iq3_s",
    "mul_mat_iq3_xxs",
    "mul_mat_iq4_nl",
    "mul_mat_iq4_xs",
    "mul_mat_mma_bf16",
    "mul_mat_mma_f16",
    "mul_mat_mma_iq1_m",
    "mul_mat_mma_iq1_s",
    "mul_mat_mma_iq2_s",
    "mul_mat_mma_iq2_xs",
    "mul_mat_mma_iq2_xxs",
    "mul_mat_mma_iq3_s",
    "mul_mat_mma_iq3_xxs",
    "mul_mat_mma_iq4_nl",
    "mul_mat_mma_iq4_xs",
    "mul_mat_mma_mxfp4",
    "mul_mat_mma_nvfp4",
    "mul_mat_mma_packed_q4_0",
    "mul_mat_mma_packed_q4_k",
    "mul_mat_mma_packed_q5_k",
    "mul_mat_mma_packed_q6_k",
    "mul_mat_mma_packed_q8_0",
    "mul_mat_mma_q1_0",
    "mul_mat_mma_q2_0",
    "mul_mat_mma_q2_k",
    "mul_mat_mma_q3_k",
    "mul_mat_mma_q4_0",
    "mul_mat_mma_q4_1",
    "mul_mat_mma_q4_k",
    "mul_mat_mma_q5_0",
    "mul_mat_mma_q5_1",
    "mul_mat_mma_q5_k",
    "mul_mat_mma_q6_k",
    "mul_mat_mma_q8_0",
    "mul_mat_mma_tq1_0",
    "mul_mat_mma_tq2_0",
    "mul_mat_mxfp4",
    "mul_mat_nvfp4",
    "mul_mat_packed_q4_0",
    "mul_mat_packed_q4_k",
    "mul_mat_packed_q5_k",
    "mul_mat_packed_q6_k",
    "mul_mat_packed_q8_0",
    "mul_mat_q1_0",
    "mul_mat_q2_0",
    "mul_mat_q2_k",
    "mul_mat_q3_k",
    "mul_mat_q4_0",
    "mul_mat_q4_1",
    "mul_mat_q4_k",
    "mul_mat_q5_0",
    "mul_mat_q5_1",
    "mul_mat_q5_k",
    "mul_mat_q6_k",
    "mul_mat_q8_0",
    "mul_mat_tq1_0",
    "mul_mat_tq2_0",
    "norm",
    "norm_sm90",
    "quantize",
    "quantize_sm90",
    "reduce",
    "rope",
    "rope_sm90",
    "rows",
    "soft_max",
    "sort",
    "ssm_conv",
    "state_128",
    "state_256",
    "state_32",
    "training",
];

/// Returns the module called `name`.
pub fn find(name: &str) -> Option<&'static Module> {
    MODULES.iter().find(|module| module.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_start_early_wait() {
        let early = MODULES.iter().filter(|module| module.starts_early());
        let mut count = 0;
        for module in early {
            let plain = module.name.trim_end_matches(EARLY);
            let plain = find(plain).unwrap();
            assert_eq!(plain.for_capability(90), module);
            assert_eq!(plain.for_capability(89), plain);
            let ptx = module.ptx().unwrap();
            for kernel in ptx.split(".visible .entry ").skip(1) {
                let name = kernel.split('(').next().unwrap();
                let waits = kernel.matches("griddepcontrol.wait;").count();
                assert_eq!(waits, 1, "{name} of {}", module.name);
                count += 1;
            }
        }
        assert!(count > 60, "{count}");
    }

    #[test]
    fn modules_are_those_of_the_list() {
        let list = include_str!("../kernels/modules.txt");
        let lines = list.lines().filter(|line| !line.starts_with('#'));
        let mut listed: Vec<_> = lines
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        listed.sort_unstable();
        let names: Vec<_> = MODULES.iter().map(|module| module.name).collect();
        assert_eq!(names, listed);
        for module in MODULES {
            assert!(module.ptx().unwrap().contains(".entry"), "{}", module.name);
        }
    }
}
