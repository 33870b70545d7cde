//! Metrics in Prometheus' text format. Names of llama.cpp are unchanged. All others are vLLM's
//! names behind a prefix, so that monitoring for vLLM works with this server. Each name has one
//! series.

use crate::app::App;
use crate::latency::{ENDS, Histogram};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The text so far.
struct MetricsText<'p> {
    text: String,
    /// Prefix before the colon of names that are not llama.cpp's.
    prefix: &'p str,
}

impl MetricsText<'_> {
    fn head(&mut self, name: &str, kind: &str, help: &str) -> String {
        let name = if name.contains(':') {
            name.to_owned()
        } else {
            format!("{}:{name}", self.prefix)
        };
        self.text
            .push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        name
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        let name = self.head(name, kind, help);
        self.text.push_str(&format!("{name} {value}\n"));
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.one(name, "counter", help, value as f64);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.one(name, "gauge", help, value);
    }

    /// Writes the adapters of requests that have a slot, and of those that wait for one. As in
    /// vLLM, the value is the time: of several series, the latest counts.
    fn adapters(&mut self, app: &App, [running, waiting]: &[Vec<PathBuf>; 2]) {
        let name = self.head(
            "lora_requests_info",
            "gauge",
            "Adapters of requests that have a slot, and of those that wait for one; the value is the time.",
        );
        let names = |files: &[PathBuf]| {
            let adapters = app.options.adapters.iter().enumerate();
            let used = adapters
                .filter(|(_, (adapter, _))| files.iter().any(|file| file == adapter.path()));
            let names: Vec<String> = used
                .filter_map(|(number, _)| app.adapter_name(number).map(escaped))
                .collect();
            names.join(",")
        };
        let (running, waiting) = (names(running), names(waiting));
        let most = app.options.adapters.len();
        let now = crate::ids::seconds();
        self.text.push_str(&format!(
            "{name}{{max_lora=\"{most}\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\"}} {now}\n"
        ));
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        let name = self.head(name, "histogram", help);
        let (counts, sum) = histogram.sums();
        let ends = ENDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (end, count) in ends.zip(counts) {
            self.text
                .push_str(&format!("{name}_bucket{{le=\"{end}\"}} {count}\n"));
        }
        let all = counts[ENDS.len()];
        self.text
            .push_str(&format!("{name}_sum {sum}\n{name}_count {all}\n"));
    }
}

/// Escapes the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', r"\\")
        .replace('"', r#"\""#)
        .replace('\n', r"\n")
}

fn rate(tokens: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}

/// Returns the metrics of a model.
pub fn text(app: &App) -> String {
    let view = app
        .handle
        .as_ref()
        .map_or_else(Arc::default, |handle| handle.view());
    let embedder = app.embedder.as_ref();
    let embedded = embedder.map_or((0, 0), |embedder| embedder.totals());
    let totals = &view.totals;
    let slots = view.slots.iter();
    let busy = slots.filter(|slot| slot.request.is_some()).count() as f64;
    // Rates cover the time since the last scrape.
    let before = app.last_scrape(*totals);
    let part = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
    let mut told = MetricsText {
        text: String::new(),
        prefix: &app.options.metrics_names,
    };
    let prompt_tokens = totals.prompt_tokens + embedded.0;
    told.counter(
        "llamacpp:prompt_tokens_total",
        "Tokens of prompts that were computed.",
        prompt_tokens,
    );
    told.counter(
        "llamacpp:prompt_tokens_cached_total",
        "Tokens of prompts that were known.",
        totals.cached_tokens,
    );
    let reading = totals.prompt_time.as_secs_f64();
    told.one(
        "llamacpp:prompt_seconds_total",
        "counter",
        "Time of steps that computed prompts.",
        reading,
    );
    told.counter(
        "llamacpp:tokens_predicted_total",
        "Tokens that were written.",
        totals.generated_tokens,
    );
    let writing = totals.decode_time.as_secs_f64();
    told.one(
        "llamacpp:tokens_predicted_seconds_total",
        "counter",
        "Time of steps that wrote tokens only.",
        writing,
    );
    told.counter(
        "llamacpp:n_decode_total",
        "Steps.",
        totals.steps + embedded.1,
    );
    told.counter("llamacpp:n_tokens_max", "The longest text.", totals.longest);
    told.counter(
        "llamacpp:spec_decode_num_draft_tokens_total",
        "Tokens that were drafted.",
        totals.drafted_tokens,
    );
    told.counter(
        "llamacpp:spec_decode_num_accepted_tokens_total",
        "Drafted tokens that were taken.",
        totals.accepted_tokens,
    );
    told.counter(
        "llamacpp:spec_decode_num_drafts_total",
        "Drafts.",
        totals.drafts,
    );
    let read_lately = totals.prompt_tokens.saturating_sub(before.prompt_tokens);
    let reading_lately = totals.prompt_time.saturating_sub(before.prompt_time);
    told.gauge(
        "llamacpp:prompt_tokens_seconds",
        "Tokens of prompts per second.",
        rate(read_lately, reading_lately),
    );
    let wrote_lately = totals
        .generated_tokens
        .saturating_sub(before.generated_tokens);
    let writing_lately = totals.decode_time.saturating_sub(before.decode_time);
    told.gauge(
        "llamacpp:predicted_tokens_seconds",
        "Tokens written per second.",
        rate(wrote_lately, writing_lately),
    );
    told.gauge(
        "llamacpp:requests_processing",
        "Requests that have a slot.",
        busy,
    );
    let queued = view.queued.values().sum::<usize>() as f64;
    told.gauge(
        "llamacpp:requests_deferred",
        "Requests that wait for a slot.",
        queued,
    );
    let per_step = part(totals.busy_slots as f64, totals.steps as f64);
    told.gauge(
        "llamacpp:n_busy_slots_per_decode",
        "Slots at work in a step, on average.",
        per_step,
    );

    told.gauge("num_requests_running", "Requests that have a slot.", busy);
    told.gauge(
        "num_requests_waiting",
        "Requests that wait for a slot.",
        queued,
    );
    let used = part(view.used_cells as f64, view.cells as f64);
    told.gauge(
        "kv_cache_usage_perc",
        "The part of the cache that is used, from 0 to 1, kept texts included.",
        used,
    );
    let name = told.head(
        "cache_config_info",
        "gauge",
        "The cache: a block is one token.",
    );
    told.text.push_str(&format!(
        "{name}{{block_size=\"1\",num_gpu_blocks=\"{}\"}} 1\n",
        view.cells
    ));
    if !app.options.adapters.is_empty() {
        told.adapters(app, &view.adapters);
    }
    told.counter(
        "prompt_tokens_total",
        "Tokens of prompts, whether they were known or not.",
        totals.asked_tokens,
    );
    told.counter(
        "generation_tokens_total",
        "Tokens that were written.",
        totals.generated_tokens,
    );
    told.counter(
        "prefix_cache_queries_total",
        "Tokens of prompts that were looked for.",
        totals.asked_tokens,
    );
    told.counter(
        "prefix_cache_hits_total",
        "Those of them that were known.",
        totals.cached_tokens,
    );
    told.counter(
        "num_preemptions_total",
        "How often a request made room for others.",
        totals.preempted,
    );
    told.counter(
        "request_success_total",
        "Requests that were answered.",
        totals.finished,
    );
    let latencies = &app.latencies;
    told.histogram(
        "time_to_first_token_seconds",
        "From a request to its first token.",
        &latencies.first_token,
    );
    told.histogram(
        "inter_token_latency_seconds",
        "Between one token and the next.",
        &latencies.next_token,
    );
    told.histogram(
        "e2e_request_latency_seconds",
        "From a request to the end of its answer.",
        &latencies.whole,
    );

    told.counter(
        "samite:requests_failed_total",
        "Requests that failed.",
        totals.failed,
    );
    told.counter(
        "samite:requests_cancelled_total",
        "Requests that were cancelled, or whose reader left.",
        totals.cancelled,
    );
    told.counter(
        "samite:prefix_evictions_total",
        "Kept texts that were given up.",
        totals.evicted,
    );
    told.gauge(
        "samite:prefixes_kept",
        "Texts that are kept.",
        view.kept as f64,
    );
    told.text
}
