//! Instruction set detection. Only detection creates tokens for instructions.
//!
//! A value of [`Avx2`], [`Avx512`] or [`Dotprod`] proves that this processor has these
//! instructions. Code that needs them takes the token instead of trusting a comment.

/// Name of the environment variable that lowers the instruction set level: `generic`, `avx2`,
/// `avx-vnni`, `avx512`, `avx512-vnni` or `amx` on x86-64, `generic`, `dotprod` or `i8mm` on
/// aarch64.
pub const ISA_VARIABLE: &str = "SAMITE_CPU_ISA";

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use std::sync::OnceLock;

/// Instruction set level that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum IsaLevel {
    /// Instructions that every processor of the architecture has.
    Generic,
    /// NEON with byte dot products.
    Dotprod,
    /// NEON with byte matrix products, and all of [`IsaLevel::Dotprod`].
    I8mm,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-VNNI, and all of [`IsaLevel::Avx2`].
    AvxVnni,
    /// AVX-512 F, BW, DQ and VL, and all of [`IsaLevel::Avx2`].
    Avx512,
    /// AVX-512 VNNI, and all of [`IsaLevel::Avx512`].
    Avx512Vnni,
    /// AMX for 8-bit integers, and all of [`IsaLevel::Avx512Vnni`].
    Amx,
}

impl IsaLevel {
    /// Returns the level called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name.trim().to_ascii_lowercase().as_str() {
            "generic" => IsaLevel::Generic,
            "dotprod" => IsaLevel::Dotprod,
            "i8mm" => IsaLevel::I8mm,
            "avx2" => IsaLevel::Avx2,
            "avx-vnni" => IsaLevel::AvxVnni,
            "avx512" => IsaLevel::Avx512,
            "avx512-vnni" => IsaLevel::Avx512Vnni,
            "amx" => IsaLevel::Amx,
            _ => return None,
        })
    }
}

/// Proof that NEON byte dot products are available.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Dotprod {
    i8mm: bool,
}

impl Dotprod {
    /// Returns whether byte matrix products are also available.
    #[cfg_attr(not(target_arch = "aarch64"), allow(dead_code))]
    pub fn i8mm(self) -> bool {
        self.i8mm
    }
}

/// Proof that AVX2, FMA and F16C are available.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Avx2 {
    vnni: bool,
}

impl Avx2 {
    /// Returns whether AVX-VNNI is also available.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn vnni(self) -> bool {
        self.vnni
    }
}

/// Proof that AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C are available.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Avx512 {
    vnni: bool,
    crossed: bool,
    tiles: Option<Tiles>,
}

impl Avx512 {
    /// Returns whether AVX-512 VNNI is also available.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn vnni(self) -> bool {
        self.vnni
    }

    /// Returns a token if AMX is also available, which implies AVX-512 VNNI.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn tiles(self) -> Option<Tiles> {
        self.tiles
    }
}

/// Proof that AMX for 8-bit integers is available, and that the system lets this process use it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tiles {
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    bf16: Option<Bf16Tiles>,
}

/// Proof that AMX for BF16 is also available.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bf16Tiles(());

impl Tiles {
    /// Returns a token if tiles of BF16 can also be multiplied.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn bf16(self) -> Option<Bf16Tiles> {
        self.bf16
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn detect() -> Option<Self> {
        use std::arch::x86_64::__cpuid_count;
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const AMX_INT8: u32 = 1 << 25;
        // See https://docs.kernel.org/arch/x86/xstate.html
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        static DETECTED: OnceLock<Option<Tiles>> = OnceLock::new();
        *DETECTED.get_or_init(|| {
            let features = __cpuid_count(7, 0).edx;
            // SAFETY: the call asks the kernel for permission to use tiles. It does not access this
            // program's memory.
            let detected = features & AMX_TILE != 0
                && features & AMX_INT8 != 0
                && unsafe {
                    libc::syscall(
                        libc::SYS_arch_prctl,
                        ARCH_REQ_XCOMP_PERM,
                        XFEATURE_XTILEDATA,
                    ) == 0
                };
            detected.then_some(Tiles {
                bf16: (features & AMX_BF16 != 0).then_some(Bf16Tiles(())),
            })
        })
    }

    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    fn detect() -> Option<Self> {
        None
    }
}

/// Instruction set of one device's kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Isa {
    Generic,
    #[cfg_attr(not(target_arch = "aarch64"), allow(dead_code))]
    Dotprod(Dotprod),
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Avx2(Avx2),
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Avx512(Avx512),
}

impl Isa {
    /// Returns the highest level that this processor has and that `limit` and the
    /// [environment](ISA_VARIABLE) allow.
    pub fn detect(limit: Option<IsaLevel>) -> Self {
        let variable = std::env::var(ISA_VARIABLE).ok();
        let wanted = variable.as_deref().and_then(IsaLevel::from_name);
        if let (Some(name), None) = (&variable, wanted) {
            tracing::warn!(
                "there is no instruction set level '{name}': {ISA_VARIABLE} has no effect"
            );
        }
        let limit = [limit, wanted]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(IsaLevel::Amx);
        Self::at_most(limit)
    }

    /// Returns the same instructions with [crossed products](crate::simd::int16), if available.
    pub fn crossed(self) -> Option<Self> {
        match self {
            Isa::Avx512(
                token @ Avx512 {
                    vnni: true,
                    tiles: None,
                    ..
                },
            ) => Some(Isa::Avx512(Avx512 {
                crossed: true,
                ..token
            })),
            _ => None,
        }
    }

    /// Returns whether products are crossed.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub fn is_crossed(self) -> bool {
        matches!(self, Isa::Avx512(token) if token.crossed)
    }

    /// Returns the same instructions without crossed products.
    pub fn straight(self) -> Option<Self> {
        match self.crossed()? {
            Isa::Avx512(token) => Some(Isa::Avx512(Avx512 {
                crossed: false,
                ..token
            })),
            _ => None,
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn at_most(limit: IsaLevel) -> Self {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx512 && limit >= IsaLevel::Avx512 {
            let vnni = limit >= IsaLevel::Avx512Vnni && is_x86_feature_detected!("avx512vnni");
            let tiles = (vnni && limit >= IsaLevel::Amx)
                .then(Tiles::detect)
                .flatten();
            Isa::Avx512(Avx512 {
                vnni,
                crossed: false,
                tiles,
            })
        } else if avx2 && limit >= IsaLevel::Avx2 {
            let vnni = limit >= IsaLevel::AvxVnni && is_x86_feature_detected!("avxvnni");
            Isa::Avx2(Avx2 { vnni })
        } else {
            Isa::Generic
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn at_most(limit: IsaLevel) -> Self {
        if limit >= IsaLevel::Dotprod && std::arch::is_aarch64_feature_detected!("dotprod") {
            let i8mm = limit >= IsaLevel::I8mm && std::arch::is_aarch64_feature_detected!("i8mm");
            Isa::Dotprod(Dotprod { i8mm })
        } else {
            Isa::Generic
        }
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn at_most(_limit: IsaLevel) -> Self {
        Isa::Generic
    }

    /// Returns the name to show to users.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512(token) if token.tiles.is_some() => "amx",
            Isa::Avx512(token) if token.vnni => "avx512-vnni",
            Isa::Avx512(_) => "avx512",
            Isa::Avx2(token) if token.vnni => "avx-vnni",
            Isa::Avx2(_) => "avx2",
            Isa::Dotprod(token) if token.i8mm => "neon-i8mm",
            Isa::Dotprod(_) => "neon-dotprod",
            Isa::Generic if cfg!(target_arch = "aarch64") => "neon",
            Isa::Generic => "generic",
        }
    }

    /// Calls `f`, compiled for this instruction set, so that simple loops in it are vectorised.
    /// This works only for code that is small enough to be inlined. For larger code, use
    /// [`vectorized`].
    #[inline(always)]
    pub fn run<R>(self, f: impl FnOnce() -> R) -> R {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves that the instructions are available.
            Isa::Avx2(_) => unsafe { with_avx2(f) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves that the instructions are available.
            Isa::Avx512(_) => unsafe { with_avx512(f) },
            _ => f(),
        }
    }

    /// Returns every level that this processor has, with and without crossed products.
    #[cfg(test)]
    pub fn all() -> Vec<Isa> {
        let mut all: Vec<Isa> = Vec::new();
        for level in [
            IsaLevel::Generic,
            IsaLevel::Dotprod,
            IsaLevel::I8mm,
            IsaLevel::Avx2,
            IsaLevel::AvxVnni,
            IsaLevel::Avx512,
            IsaLevel::Avx512Vnni,
            IsaLevel::Amx,
        ] {
            let isa = Self::at_most(level);
            if all.last().is_none_or(|last| last.name() != isa.name()) {
                all.push(isa);
                all.extend(isa.crossed());
            }
        }
        all
    }
}

/// Defines a function that is compiled once for each instruction set, so that its loops are
/// vectorised. It takes an [`Isa`] first. Its body may use `FUSED`, which is true if a product and
/// a sum are one instruction. A function that it takes may be generic, `<F>` with `where [Fn(f32)
/// -> f32]`.
macro_rules! vectorized {
    ($(#[$meta:meta])* $visibility:vis unsafe fn $($rest:tt)*) => {
        $crate::detect::vectorized! { @define [$(#[$meta])* $visibility] [unsafe] $($rest)* }
    };
    ($(#[$meta:meta])* $visibility:vis fn $($rest:tt)*) => {
        $crate::detect::vectorized! { @define [$(#[$meta])* $visibility] [] $($rest)* }
    };
    (@define [$($before:tt)*] [$($unsafe:tt)?] $name:ident $(<$generic:ident>)? ($($argument:ident: $type:ty),* $(,)?)
        $(-> $result:ty)? $(where [$($bound:tt)*])? $body:block
    ) => {
        $($before)* $($unsafe)? fn $name $(<$generic: $($bound)*>)? (isa: $crate::detect::Isa,
            $($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::extra_unused_type_parameters)]
            $($unsafe)? fn body<$($generic: $($bound)*,)? const FUSED: bool>($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2 $(<$generic: $($bound)*>)? ($($argument: $type),*) $(-> $result)? {
                // SAFETY: `body` is unsafe only if the whole function is, and then has the same
                // requirements. It gets the same arguments.
                $($unsafe)? { body::<$($generic,)? true>($($argument),*) }
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512 $(<$generic: $($bound)*>)? ($($argument: $type),*) $(-> $result)? {
                // SAFETY: `body` is unsafe only if the whole function is, and then has the same
                // requirements. It gets the same arguments.
                $($unsafe)? { body::<$($generic,)? true>($($argument),*) }
            }

            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the token proves that the instructions are available. The caller
                // guarantees the rest.
                $crate::detect::Isa::Avx2(_) => unsafe { avx2($($argument),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the token proves that the instructions are available. The caller
                // guarantees the rest.
                $crate::detect::Isa::Avx512(_) => unsafe { avx512($($argument),*) },
                // SAFETY: `body` is unsafe only if the whole function is, and then has the same
                // requirements. It gets the same arguments.
                _ => $($unsafe)? { body::<$($generic,)? { cfg!(target_arch = "aarch64") }>($($argument),*) },
            }
        }
    };
}
pub(crate) use vectorized;

/// Returns a function compiled for an instruction set and an element type.
macro_rules! compiled {
    ($isa:expr, $function:ident, $element:ty) => {{
        #[cfg(target_arch = "aarch64")]
        use neon as base;
        #[cfg(not(target_arch = "aarch64"))]
        use portable as base;
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => Some(avx512::$function::<$element> as _),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => Some(avx2::$function::<$element> as _),
            _ => Some(base::$function::<$element> as _),
        }
    }};
}

/// Selects one of the compiled functions.
macro_rules! choose {
    ($isa:expr, $dtype:expr, $function:ident) => {
        match $dtype {
            DType::F32 => $crate::detect::compiled!($isa, $function, F32),
            DType::F16 => $crate::detect::compiled!($isa, $function, F16),
            DType::BF16 => $crate::detect::compiled!($isa, $function, Bf16),
            _ => None,
        }
    };
}

pub(crate) use choose;
pub(crate) use compiled;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_lower_the_level() {
        assert_eq!(Isa::at_most(IsaLevel::Generic).name(), Isa::Generic.name());
        assert!(!Isa::at_most(IsaLevel::Avx2).name().starts_with("avx512"));
        assert_ne!(Isa::at_most(IsaLevel::Avx512).name(), "avx512-vnni");
        assert_eq!(IsaLevel::from_name(" AVX2"), Some(IsaLevel::Avx2));
        assert_eq!(IsaLevel::from_name("avx-vnni"), Some(IsaLevel::AvxVnni));
        assert_eq!(IsaLevel::from_name("mmx"), None);
    }

    #[test]
    fn code_runs_at_every_level() {
        for isa in Isa::all() {
            assert_eq!(isa.run(|| (0..100).map(|x| x as f32).sum::<f32>()), 4950.0);
        }
    }
}
