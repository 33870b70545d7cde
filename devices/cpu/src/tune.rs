//! Measured choices: the fastest settings of this processor, if its instructions do not determine
//! them.
//!
//! Processors with the same instructions differ in the fastest way to read memory and in their
//! multiplication units. Each [`ImplementationChoice`] is therefore measured on first use, in
//! milliseconds, and cached in a file per processor model. Results never depend on a choice.

use crate::activations::ActivationForm;
use crate::detect::{Isa, IsaLevel};
use crate::packed::{self, PackedProduct, layout::PackedLayout};
use crate::product::{AccessPattern, Column, Panel};
use samite_core::environment::Instant;
use samite_core::{DType, HostMemory, Layout};
use samite_disk_cache::{CacheFile, cache_folder};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Name of the environment variable that overrides measured choices. `default` measures nothing,
/// and `measure` measures again. Settings in the format of `samite devices -v` are used as given,
/// for example `reading=128x2,128x2,3072x1 crossed=no`.
pub const TUNING_VARIABLE: &str = "SAMITE_CPU_TUNING";

/// Version of the measurements.
const VERSION: u32 = 1;

/// Returns the highest instruction set level, like [`Isa::detect`], with [crossed
/// products](crate::simd::int16) if they are faster.
pub(crate) fn detect(limit: Option<IsaLevel>) -> Isa {
    let isa = Isa::detect(limit);
    match isa.crossed() {
        Some(crossed) if choose::<CrossedProducts>(isa).0 => crossed,
        _ => isa,
    }
}

/// A choice between implementations with the same results.
pub(crate) trait ImplementationChoice: Copy + PartialEq + fmt::Display + 'static {
    const NAME: &'static str;
    /// Choice unless another one is clearly faster.
    const DEFAULT: Self;
    /// Parses the format of [`fmt::Display`].
    fn parse(text: &str) -> Option<Self>;
    /// Measures, or returns `None` if this cannot be measured here.
    fn measure(isa: Isa) -> Option<Self>;
    /// Returns the choices of this process so far.
    fn settled() -> &'static Mutex<Vec<(Isa, Self, Source)>>;
}

/// Source of a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Source {
    Default,
    Given,
    Kept,
    Measured,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Default => "by default",
            Source::Given => "given",
            Source::Kept => "measured before",
            Source::Measured => "measured",
        })
    }
}

/// Returns the choice for an instruction set.
pub(crate) fn choose<C: ImplementationChoice>(isa: Isa) -> C {
    choose_from::<C>(isa).0
}

fn choose_from<C: ImplementationChoice>(isa: Isa) -> (C, Source) {
    let mut settled = C::settled().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, choice, source)) = settled.iter().find(|(other, ..)| *other == isa) {
        return (*choice, *source);
    }
    let (choice, source) = find(isa);
    settled.push((isa, choice, source));
    (choice, source)
}

fn find<C: ImplementationChoice>(isa: Isa) -> (C, Source) {
    let variable = std::env::var(TUNING_VARIABLE).unwrap_or_default();
    match given::<C>(&variable) {
        TuneRequest::Default => return (C::DEFAULT, Source::Default),
        TuneRequest::Given(choice) => return (choice, Source::Given),
        TuneRequest::Nothing => {
            if let Some(choice) = kept_in::<C>(isa).and_then(|file| kept(&file)) {
                return (choice, Source::Kept);
            }
        }
        TuneRequest::Measure => {}
        TuneRequest::Wrong(what) => tracing::warn!(
            "{TUNING_VARIABLE}: '{what}' is neither 'default', 'measure' nor a setting of '{}' such as '{}'",
            C::NAME,
            C::DEFAULT
        ),
    }
    let Some(choice) = C::measure(isa) else {
        return (C::DEFAULT, Source::Default);
    };
    if let Some(file) = kept_in::<C>(isa) {
        file.write(choice.to_string().as_bytes());
    }
    (choice, Source::Measured)
}

/// Request in the environment variable.
#[derive(Debug, PartialEq)]
enum TuneRequest<'a, C> {
    Nothing,
    Default,
    Measure,
    Given(C),
    Wrong(&'a str),
}

fn given<C: ImplementationChoice>(variable: &str) -> TuneRequest<'_, C> {
    let words = variable.split_whitespace();
    let mut wish = TuneRequest::Nothing;
    for word in words {
        wish = match (word, word.split_once('=')) {
            ("default", _) => TuneRequest::Default,
            ("measure", _) => TuneRequest::Measure,
            (_, Some((name, value))) if name == C::NAME => match C::parse(value) {
                Some(choice) => TuneRequest::Given(choice),
                None => TuneRequest::Wrong(word),
            },
            (_, Some((name, _)))
                if [AccessPatterns::NAME, CrossedProducts::NAME].contains(&name) =>
            {
                continue;
            }
            _ => TuneRequest::Wrong(word),
        };
    }
    wish
}

fn kept<C: ImplementationChoice>(file: &CacheFile) -> Option<C> {
    C::parse(&file.text()?)
}

/// Returns the cache file of a choice for this processor.
fn kept_in<C: ImplementationChoice>(isa: Isa) -> Option<CacheFile> {
    let processor = format!("{} {}", model(), isa.name());
    let subject = format!("{VERSION} {processor}");
    let name = format!("cpu-{}", C::NAME);
    Some(CacheFile::new(
        &cache_folder()?,
        &name,
        &processor,
        &subject,
    ))
}

/// Returns the processor's model.
fn model() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = std::arch::x86_64::__cpuid(0);
        let prologue = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        let prologue: String = prologue
            .as_flattened()
            .iter()
            .map(|&byte| char::from(byte))
            .filter(char::is_ascii_alphanumeric)
            .collect();
        // Family, model and stepping.
        format!("{prologue}-{:x}", std::arch::x86_64::__cpuid(1).eax)
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::env::consts::ARCH.into()
}

/// Returns all choices as text, in the format of [`TUNING_VARIABLE`], with their sources.
pub(crate) fn report(isa: Isa) -> String {
    let (readings, from) = choose_from::<AccessPatterns>(isa);
    let mut text = format!("{}={readings} ({from})", AccessPatterns::NAME);
    if let Some(straight) = isa.straight() {
        let (crossing, from) = choose_from::<CrossedProducts>(straight);
        text += &format!(" {}={crossing} ({from})", CrossedProducts::NAME);
    }
    text
}

impl AccessPattern {
    /// Candidates.
    const ALL: [Self; 5] = [
        Self::new(128, 1),
        Self::new(128, 2),
        Self::new(3072, 1),
        Self::new(6144, 1),
        Self::new(9216, 1),
    ];

    fn parse(text: &str) -> Option<Self> {
        let (ahead, streams) = text.split_once('x')?;
        let (ahead, streams) = (ahead.parse().ok()?, streams.parse().ok()?);
        (ahead <= 1 << 20 && (1..=8).contains(&streams)).then_some(AccessPattern { ahead, streams })
    }
}

/// Access patterns for weights of products with one column, with two to four, and with more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AccessPatterns([AccessPattern; 3]);

impl AccessPatterns {
    /// With many columns, data that arrives too early evicts them.
    pub const DEFAULT: Self = AccessPatterns([
        AccessPattern::new(6144, 1),
        AccessPattern::new(9216, 1),
        AccessPattern::new(3072, 1),
    ]);

    /// Returns the access pattern of a product with `columns` columns.
    pub fn for_columns(&self, columns: usize) -> AccessPattern {
        let [one, few, more] = self.0;
        match columns {
            0 | 1 => one,
            2..=4 => few,
            _ => more,
        }
    }
}

impl fmt::Display for AccessPatterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [one, few, more] = self
            .0
            .map(|AccessPattern { ahead, streams }| format!("{ahead}x{streams}"));
        write!(f, "{one},{few},{more}")
    }
}

impl ImplementationChoice for AccessPatterns {
    const NAME: &'static str = "reading";
    const DEFAULT: Self = AccessPatterns::DEFAULT;

    fn parse(text: &str) -> Option<Self> {
        let readings = text
            .split(',')
            .map(AccessPattern::parse)
            .collect::<Option<Vec<_>>>()?;
        Some(AccessPatterns(readings.try_into().ok()?))
    }

    fn measure(isa: Isa) -> Option<Self> {
        /// More than caches hold that processors fill ahead. The data there is flushed.
        const BYTES: usize = 4 << 20;
        if !cfg!(target_arch = "x86_64") {
            return None; // no prefetching
        }
        let mut best = AccessPatterns::DEFAULT;
        for (default, columns) in best.0.iter_mut().zip([1, 4, 8]) {
            let work = TimedProduct::new(isa, DType::Q4_0, [2048, BYTES / 1152], columns)?;
            let ways = AccessPattern::ALL.map(|reading| {
                let work = &work;
                move || {
                    work.flush();
                    work.run(reading)
                }
            });
            *default = AccessPattern::ALL[fastest(
                &ways,
                AccessPattern::ALL.iter().position(|way| way == default)?,
            )];
        }
        Some(best)
    }

    fn settled() -> &'static Mutex<Vec<(Isa, Self, Source)>> {
        static SETTLED: Mutex<Vec<(Isa, AccessPatterns, Source)>> = Mutex::new(Vec::new());
        &SETTLED
    }
}

/// True if [crossed products](crate::simd::int16) are faster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CrossedProducts(pub bool);

impl fmt::Display for CrossedProducts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 { "yes" } else { "no" })
    }
}

impl ImplementationChoice for CrossedProducts {
    const NAME: &'static str = "crossed";
    const DEFAULT: Self = CrossedProducts(false);

    fn parse(text: &str) -> Option<Self> {
        match text {
            "yes" => Some(CrossedProducts(true)),
            "no" => Some(CrossedProducts(false)),
            _ => None,
        }
    }

    fn measure(isa: Isa) -> Option<Self> {
        const COLUMNS: usize = 240;
        let work = |isa| TimedProduct::new(isa, DType::F16, [1024, 4 * packed::PANEL], COLUMNS);
        let (straight, crossed) = (work(isa)?, work(isa.crossed()?)?);
        let ways = [&straight, &crossed].map(|work| move || work.run(AccessPattern::DEFAULT));
        Some(CrossedProducts(fastest(&ways, 0) == 1))
    }

    fn settled() -> &'static Mutex<Vec<(Isa, Self, Source)>> {
        static SETTLED: Mutex<Vec<(Isa, CrossedProducts, Source)>> = Mutex::new(Vec::new());
        &SETTLED
    }
}

/// Returns the index of the fastest of several implementations, or `default` if none is clearly
/// faster. They take turns, so that disturbances affect all.
fn fastest(ways: &[impl Fn() -> Duration], default: usize) -> usize {
    const TURNS: usize = 4;
    let mut best = vec![Duration::MAX; ways.len()];
    for _ in 0..TURNS {
        for (best, way) in best.iter_mut().zip(ways) {
            *best = way().min(*best);
        }
    }
    let clearly = best[default].mul_f64(0.95);
    (0..ways.len())
        .filter(|&way| best[way] < clearly)
        .min_by_key(|&way| best[way])
        .unwrap_or(default)
}

/// A product to time.
struct TimedProduct {
    product: PackedProduct,
    /// Kept only because the product has its address.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    weights: Arc<HostMemory>,
    panel: Panel,
    columns: Vec<Column>,
    /// Columns and results, whose addresses the product has.
    _places: [Arc<HostMemory>; 2],
}

impl TimedProduct {
    /// Creates a product of `rows` packed rows of `k` elements. Returns `None` without memory or
    /// such a product.
    fn new(isa: Isa, dtype: DType, [k, rows]: [usize; 2], columns: usize) -> Option<Self> {
        let product = packed::product(isa, dtype, k, columns, columns)?;
        match product.form {
            ActivationForm::Int8Slabs(_) => {}
            #[cfg(target_arch = "x86_64")]
            ActivationForm::Int16Slabs(_) => {}
            _ => return None,
        }
        let rows = rows / packed::PANEL * packed::PANEL;
        let layout = PackedLayout::new(&Layout::contiguous(dtype, [k, rows, 1, 1]).ok()?)?;
        let room = |bytes| HostMemory::allocate(bytes, "cpu", "measuring").ok();
        let (stride, bytes) = (product.form.stride(k)?, product.form.bytes(k, columns)?);
        let (weights, x, out) = (
            room(layout.bytes())?,
            room(bytes)?,
            room(4 * rows * columns)?,
        );
        // Small normal numbers, whatever the field.
        weights.fill(0, layout.bytes(), 0x11).ok()?;
        let numbers: Vec<f32> = (0..k).map(|i| (i % 7) as f32 - 3.0).collect();
        let list = (0..columns).map(|c| {
            let to = x.base().as_ptr().wrapping_add(c * stride);
            // SAFETY: there is room for each column, and the instructions were detected.
            unsafe { product.form.write(&numbers, 0, to, isa) };
            let out = out.base().as_ptr().cast::<f32>().wrapping_add(c * rows);
            Column { x: to, out }
        });
        Some(TimedProduct {
            product,
            panel: Panel {
                weights: weights.base().as_ptr(),
                stride: layout.panel_bytes,
                rows,
                k,
                first: 0,
                slabs: product.form.slabs()?.distance,
                past_caches: true,
                reading: AccessPattern::DEFAULT,
                scratch: std::ptr::null_mut(),
            },
            columns: list.collect(),
            weights,
            _places: [x, out],
        })
    }

    fn run(&self, reading: AccessPattern) -> Duration {
        let panel = Panel {
            reading,
            ..self.panel
        };
        let start = Instant::now();
        // SAFETY: weights, columns and results have the stated sizes and are not shared, and the
        // instructions were detected. Such products need no scratch memory.
        unsafe { (self.product.function)(&panel, &self.columns) };
        packed::all_stored();
        start.elapsed()
    }

    /// Flushes weights from all caches.
    fn flush(&self) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::{asm, x86_64};
            const CLFLUSHOPT: u32 = 1 << 23;
            let at_once = x86_64::__cpuid_count(7, 0).ebx & CLFLUSHOPT != 0;
            for line in (0..self.weights.len()).step_by(64) {
                let line = self.weights.base().as_ptr().wrapping_add(line);
                // SAFETY: the line is inside the memory. The first instruction was detected, the
                // others are part of every x86-64.
                unsafe {
                    if at_once {
                        asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
                    } else {
                        x86_64::_mm_clflush(line);
                    }
                }
            }
            // SAFETY: `mfence` is part of SSE2, which every x86-64 has, and does not touch memory.
            unsafe { x86_64::_mm_mfence() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_round_trip_through_text() {
        for readings in [
            AccessPatterns::DEFAULT,
            AccessPatterns([AccessPattern::ALL[1]; 3]),
        ] {
            assert_eq!(AccessPatterns::parse(&readings.to_string()), Some(readings));
        }
        for crossing in [CrossedProducts(true), CrossedProducts(false)] {
            assert_eq!(
                CrossedProducts::parse(&crossing.to_string()),
                Some(crossing)
            );
        }
        for text in [
            "",
            "128x2",
            "128x0,1x1,1x1",
            "1x1,1x1,1x1,1x1",
            "ax1,1x1,1x1",
            "9999999x1,1x1,1x1",
            "128x9,1x1,1x1",
        ] {
            assert_eq!(AccessPatterns::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_environment_variable_has_priority() {
        let both = "reading=128x2,0x1,64x4 crossed=yes";
        let readings = AccessPatterns(
            [(128, 2), (0, 1), (64, 4)].map(|(ahead, streams)| AccessPattern { ahead, streams }),
        );
        assert_eq!(given(both), TuneRequest::Given(readings));
        assert_eq!(given(both), TuneRequest::Given(CrossedProducts(true)));
        assert_eq!(given::<AccessPatterns>("crossed=no"), TuneRequest::Nothing);
        assert_eq!(given::<CrossedProducts>("default"), TuneRequest::Default);
        assert_eq!(given::<CrossedProducts>("measure"), TuneRequest::Measure);
        assert_eq!(
            given::<CrossedProducts>("crossed=perhaps"),
            TuneRequest::Wrong("crossed=perhaps")
        );
        assert_eq!(
            given::<CrossedProducts>("twisted=yes"),
            TuneRequest::Wrong("twisted=yes")
        );
    }

    #[test]
    fn only_clearly_faster_settings_replace_the_default() {
        let way = |micros| move || Duration::from_micros(micros);
        assert_eq!(fastest(&[way(100), way(97), way(99)], 0), 0);
        assert_eq!(fastest(&[way(100), way(90), way(50)], 0), 2);
        assert_eq!(fastest(&[way(50), way(100)], 0), 0);
    }

    #[test]
    fn every_measured_level_gets_a_setting() {
        for isa in Isa::all() {
            let readings = AccessPatterns::measure(isa);
            assert_eq!(readings.is_some(), cfg!(target_arch = "x86_64"), "{isa:?}");
            let asks = isa.crossed().is_some();
            assert_eq!(CrossedProducts::measure(isa).is_some(), asks, "{isa:?}");
        }
    }
}
