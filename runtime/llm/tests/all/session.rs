//! Generating text, and measuring it.

use crate::common::*;
use samite_llm::{
    Context, ContextOptions, Error, Finish, GenerateOptions, Generation, Model, ModelOptions,
    Session, perplexity,
};
use samite_reference::{FaultPlan, ReferenceDevice, ReferenceOptions};
use samite_text::{Constraint, ConstraintError, Sampler, SamplerParams};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

fn session(model: &Arc<Model>, n_ctx: usize) -> Session {
    let options = ContextOptions {
        n_ctx: Some(n_ctx),
        ..precise()
    };
    Session::new(context(model, options)).unwrap()
}

fn generate(
    session: &mut Session,
    prompt: &[u32],
    options: &GenerateOptions,
) -> (String, Generation) {
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let mut text = String::new();
    let generation = session.generate(prompt, &mut sampler, options, |piece| {
        text += piece;
        ControlFlow::Continue(())
    });
    (text, generation.unwrap())
}

fn some(max_tokens: usize) -> GenerateOptions {
    GenerateOptions {
        max_tokens: Some(max_tokens),
        ignore_end: true,
        ..GenerateOptions::default()
    }
}

#[test]
fn a_saved_session_continues_in_another_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let model = TestModel::tiny("qwen3").load(vec![cpu()], "");
    let mut first = session(&model, 64);
    let (_, before) = generate(&mut first, &tokens(9), &some(6));
    first.save(&path, "beside it").unwrap();
    let mut prompt = tokens(9);
    prompt.extend(&before.tokens);
    let (expected, _) = generate(&mut first, &prompt, &some(6));

    let mut second = session(&model, 64);
    generate(&mut second, &tokens(3), &some(2));
    assert_eq!(second.restore(&path).unwrap(), "beside it");
    assert_eq!(second.tokens(), &prompt[..14]);
    let (text, generation) = generate(&mut second, &prompt, &some(6));
    assert_eq!(text, expected);
    let timings = generation.timings;
    assert_eq!((timings.reused_tokens, timings.prompt_tokens), (14, 1));
    // The text of a sequence that other code changed is unknown.
    second.context_mut().kv_cache_mut().remove(0, 3..).unwrap();
    second.save(&path, "").unwrap_err();
    // A sequence that was saved without its tokens is not a text.
    first.context_mut().save(0).unwrap().write(&path).unwrap();
    let error = second.restore(&path).unwrap_err().to_string();
    assert!(error.contains("tokens are missing"), "{error}");
}

#[test]
fn greedy_text_matches_step_by_step_decoding() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let prompt = tokens(5);
    let (text, generation) = generate(&mut session(&model, 64), &prompt, &some(12));
    assert_eq!(generation.finish, Finish::MaxTokens);
    assert_eq!(generation.timings.prompt_tokens, 5);
    let mut all = prompt.clone();
    for &token in &generation.tokens {
        let logits = decode(&mut context(&model, precise()), &all, 0, 0)
            .pop()
            .unwrap();
        let best = (0..logits.len())
            .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
            .unwrap();
        assert_eq!(token, best as u32);
        all.push(token);
    }
    let tokenizer = model.tokenizer().unwrap();
    let bytes: Vec<u8> = generation
        .tokens
        .iter()
        .flat_map(|&t| tokenizer.token_to_piece(t, false).unwrap().to_vec())
        .collect();
    assert_eq!(text, String::from_utf8_lossy(&bytes));
}

#[test]
fn an_extended_prompt_reuses_the_cached_prefix() {
    let model = TestModel::tiny("qwen3").load(vec![cpu()], "");
    let mut session = session(&model, 64);
    let (_, first) = generate(&mut session, &tokens(10), &some(4));
    let mut longer = [tokens(10), first.tokens.clone()].concat();
    longer.push(9);
    let (_, second) = generate(&mut session, &longer, &some(3));
    // The last generated token was never decoded.
    assert_eq!(second.timings.reused_tokens, 13);
    assert_eq!(second.timings.prompt_tokens, 2);
    let (_, fresh) = generate(&mut self::session(&model, 64), &longer, &some(3));
    assert_eq!(second.tokens, fresh.tokens);
    let (_, other) = generate(&mut session, &tokens(3), &some(1));
    assert_eq!(
        (other.timings.reused_tokens, other.timings.prompt_tokens),
        (2, 1)
    );
}

#[test]
fn prefill_of_several_micro_batches_is_reported() {
    let model = TestModel::tiny("qwen3").load(vec![cpu()], "");
    let options = ContextOptions {
        n_ctx: Some(64),
        n_ubatch: 8,
        ..precise()
    };
    let mut session = Session::new(context(&model, options)).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&heard);
    session.on_prefill(move |done, all| hears.lock().unwrap().push((done, all)));
    generate(&mut session, &tokens(20), &some(1));
    assert_eq!(
        std::mem::take(&mut *heard.lock().unwrap()),
        [(0, 20), (8, 20), (16, 20), (20, 20)]
    );
    // Only tokens outside the cache count, and one micro-batch does not report progress.
    generate(&mut session, &tokens(27), &some(1));
    assert_eq!(*heard.lock().unwrap(), []);
    generate(&mut session, &tokens(40), &some(1));
    assert_eq!(*heard.lock().unwrap(), [(0, 13), (8, 13), (13, 13)]);
}

#[test]
fn finish_reasons_are_reported() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let prompt = tokens(5);
    let (text, whole) = generate(&mut session(&model, 64), &prompt, &some(20));
    let (_, full) = generate(&mut session(&model, 8), &prompt, &some(20));
    assert_eq!(full.finish, Finish::ContextFull);
    // Three more fit, and the last one's logits result in a fourth.
    assert_eq!(full.tokens, whole.tokens[..4]);
    let shifting = GenerateOptions {
        keep_when_full: Some(2),
        ..some(20)
    };
    let (_, shifted) = generate(&mut session(&model, 8), &prompt, &shifting);
    assert_eq!(
        (shifted.finish, shifted.tokens.len()),
        (Finish::MaxTokens, 20)
    );

    let (at, c) = text
        .char_indices()
        .find(|(at, c)| *at > 0 && *c != '\u{fffd}')
        .unwrap();
    let stopping = GenerateOptions {
        stop: vec![c.to_string()],
        ..some(20)
    };
    let (before, stopped) = generate(&mut session(&model, 64), &prompt, &stopping);
    assert_eq!(stopped.finish, Finish::StopString(0));
    assert_eq!(before, text[..text.find(c).unwrap().min(at)]);

    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let mut session = session(&model, 64);
    let broken = session.generate(&prompt, &mut sampler, &some(20), |_| ControlFlow::Break(()));
    assert_eq!(broken.unwrap().finish, Finish::Callback);
    let biased = SamplerParams {
        logit_bias: vec![(2, 1e6)],
        ..SamplerParams::greedy()
    };
    let mut sampler = Sampler::new(biased).unwrap();
    let ended = session.generate(&prompt, &mut sampler, &GenerateOptions::default(), |_| {
        ControlFlow::Continue(())
    });
    assert_eq!(ended.unwrap().finish, Finish::EndToken(2));
}

/// Allows the tokens 5, 6 and so on, each once, up to an end.
#[derive(Clone, Debug)]
struct Counting {
    next: u32,
    end: u32,
    mask: Vec<u32>,
    /// Threads that requested masks.
    asked: Arc<Mutex<Vec<ThreadId>>>,
}

impl Counting {
    fn up_to(end: u32) -> Self {
        Counting {
            next: 5,
            end,
            mask: Vec::new(),
            asked: Default::default(),
        }
    }
}

impl Constraint for Counting {
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError> {
        Ok(token == self.next && token < self.end)
    }

    fn mask(&mut self) -> Result<&[u32], ConstraintError> {
        self.asked.lock().unwrap().push(std::thread::current().id());
        self.mask = vec![0; 4];
        if !self.is_finished() {
            self.mask[self.next as usize / 32] = 1 << (self.next % 32);
        }
        Ok(&self.mask)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        let message = format!("{token} does not come now");
        self.allows(token)?
            .then(|| self.next += 1)
            .ok_or(ConstraintError { message })
    }

    fn is_complete(&mut self) -> bool {
        self.is_finished()
    }

    fn is_finished(&self) -> bool {
        self.next == self.end
    }

    fn reset(&mut self) -> Result<(), ConstraintError> {
        self.next = 5;
        Ok(())
    }

    fn clone_box(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn generation_obeys_a_constraint_and_ends_with_it() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let mut session = session(&model, 64);
    let mut sampler = Sampler::new(SamplerParams::default()).unwrap();
    let counting = Counting::up_to(9);
    let asked = Arc::clone(&counting.asked);
    sampler.set_constraint(Some(Box::new(counting)));
    // The constraint does not apply to the prompt, but to each text from its start.
    for _ in 0..2 {
        let options = GenerateOptions {
            log_probabilities: Some(2),
            ..some(20)
        };
        let generation = session.generate(&tokens(6), &mut sampler, &options, |_| {
            ControlFlow::Continue(())
        });
        let generation = generation.unwrap();
        assert_eq!(generation.tokens, [5, 6, 7, 8]);
        assert_eq!(generation.finish, Finish::Constraint);
        // Log-probabilities of the model, regardless of the constraint.
        assert_eq!(generation.log_probabilities.len(), 4);
        for found in generation.log_probabilities {
            assert!(found.token < 0.0 && found.top.len() == 2);
            assert!(found.top[0].1 >= found.top[1].1 && found.top[0].1 >= found.token);
        }
    }
    // After a choice was rejected, the mask is computed while the model computes.
    let here = std::thread::current().id();
    let asked = asked.lock().unwrap();
    assert!(asked.contains(&here) && asked.iter().any(|id| *id != here));
}

#[test]
fn an_externally_changed_sequence_is_not_reused() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let (_, expected) = generate(&mut session(&model, 64), &tokens(12), &some(6));
    let changes: [fn(&mut Context) -> samite_llm::Result<()>; 6] = [
        // As many tokens as before, but others; the same ones at other positions; none for a while.
        |context| {
            context.kv_cache_mut().remove(0, 6..)?;
            let tokens: Vec<u32> = (60..68).collect();
            context.decode(&samite_llm::Batch::sequence(&tokens, 6, 0))
        },
        |context| context.kv_cache_mut().shift(0, 7.., 3),
        |context| {
            context.clear()?;
            context.decode(&samite_llm::Batch::sequence(&tokens(14), 5, 0))
        },
        |context| context.kv_cache_mut().remove(0, 4..),
        |context| context.kv_cache_mut().remove(0, 2..5),
        |context| context.decode(&samite_llm::Batch::sequence(&[5, 6, 7], 20, 0)),
    ];
    for change in changes {
        let mut session = session(&model, 64);
        generate(&mut session, &tokens(12), &some(3));
        assert_eq!(session.context().kv_cache().cells().sequence_len(0), 14);
        change(session.context_mut()).unwrap();
        let (_, after) = generate(&mut session, &tokens(12), &some(6));
        assert_eq!(after.timings.reused_tokens, 0);
        assert_eq!(after.tokens, expected.tokens);
        // From here on, the sequence belongs to the session again.
        let (_, again) = generate(&mut session, &tokens(12), &some(6));
        assert_eq!(again.timings.reused_tokens, 11);
        assert_eq!(again.tokens, expected.tokens);
    }
}

#[test]
fn external_changes_during_generation_are_detected() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let (_, expected) = generate(&mut session(&model, 64), &tokens(12), &some(6));
    let mut session = session(&model, 64);
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let mut pieces = 0;
    let changed = session.generate_with(&tokens(12), &mut sampler, &some(20), |context, _| {
        pieces += 1;
        if pieces == 2 {
            // The prompt is replaced by another one of the same length.
            let cells = context.kv_cache().cells().sequence_len(0);
            context.kv_cache_mut().remove(0, ..).unwrap();
            let others: Vec<u32> = (100..100 + cells as u32).collect();
            let batch = samite_llm::Batch::sequence(&others, 0, 0);
            context.decode(&batch).unwrap();
        }
        ControlFlow::Continue(())
    });
    changed.unwrap();
    assert!(pieces > 2);
    let (_, after) = generate(&mut session, &tokens(12), &some(6));
    assert_eq!(after.timings.reused_tokens, 0);
    assert_eq!(after.tokens, expected.tokens);
}

#[test]
fn a_failed_generation_changes_nothing() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let cancel = samite_core::CancelToken::new();
    let options = ContextOptions {
        n_ctx: Some(64),
        cancel: cancel.clone(),
        ..precise()
    };
    let mut session = Session::new(context(&model, options)).unwrap();
    let (_, before) = generate(&mut session, &tokens(12), &some(3));
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let stopped = session.generate(&tokens(12), &mut sampler, &some(9), |_| {
        cancel.cancel();
        ControlFlow::Continue(())
    });
    assert!(stopped.unwrap_err().is_cancelled());
    cancel.reset();
    let (_, after) = generate(&mut session, &tokens(12), &some(3));
    assert_eq!(after.timings.reused_tokens, 11);
    assert_eq!(after.tokens, before.tokens);
}

#[test]
fn a_full_context_discards_the_older_half() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    for keep in [0, 1, 3] {
        let n_ctx = 10;
        let options = GenerateOptions {
            keep_when_full: Some(keep),
            ..some(25)
        };
        let mut session = session(&model, n_ctx);
        let (_, generation) = generate(&mut session, &tokens(7), &options);
        // The same steps without a session.
        let with_room = ContextOptions {
            n_ctx: Some(n_ctx),
            ..precise()
        };
        let mut context = context(&model, with_room);
        let mut held = tokens(7);
        let mut logits = decode(&mut context, &held, 0, 0).pop().unwrap();
        let mut all = Vec::new();
        let mut forgotten = 0;
        loop {
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            let token = best.unwrap() as u32;
            all.push(token);
            if all.len() == 25 {
                break;
            }
            if held.len() == n_ctx {
                let half = (n_ctx - keep) / 2;
                let (first, end) = (keep as i32, (keep + half) as i32);
                context.kv_cache_mut().remove(0, first..end).unwrap();
                context
                    .kv_cache_mut()
                    .shift(0, end.., -(half as i32))
                    .unwrap();
                held.drain(keep..keep + half);
                forgotten += 1;
            }
            logits = decode(&mut context, &[token], held.len() as i32, 0)
                .pop()
                .unwrap();
            held.push(token);
        }
        assert!(forgotten > 1);
        assert_eq!(generation.tokens, all, "{keep} kept");
        assert_eq!(session.tokens(), held, "{keep} kept");
    }
    // If all tokens are kept, nothing can be removed.
    let options = GenerateOptions {
        keep_when_full: Some(8),
        ..some(20)
    };
    let (_, full) = generate(&mut session(&model, 8), &tokens(5), &options);
    assert_eq!(full.finish, Finish::ContextFull);
}

#[test]
fn control_tokens_are_shown_only_if_requested() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let text = |shown: Vec<u32>| {
        let params = SamplerParams {
            logit_bias: vec![(2, 1e6)],
            ..SamplerParams::greedy()
        };
        let mut sampler = Sampler::new(params).unwrap();
        let options = GenerateOptions { shown, ..some(2) };
        let mut text = String::new();
        let mut session = session(&model, 16);
        let result = session.generate(&tokens(3), &mut sampler, &options, |piece| {
            text += piece;
            ControlFlow::Continue(())
        });
        assert_eq!(result.unwrap().tokens, [2, 2]);
        text
    };
    assert_eq!(text(Vec::new()), "");
    assert_eq!(text(vec![1, 2]), "</s></s>");
}

#[test]
fn invalid_prompts_are_refused() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let mut session = session(&model, 16);
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let mut run = |prompt: &[u32]| {
        let result = session.generate(
            prompt,
            &mut sampler,
            &some(1),
            |_| ControlFlow::Continue(()),
        );
        result.map(|generation| generation.tokens.len())
    };
    assert!(matches!(run(&[]), Err(Error::InvalidArgument(_))));
    assert!(matches!(
        run(&tokens(17)),
        Err(Error::ContextFull {
            tokens: 17,
            size: 16,
            free: 16
        })
    ));
    assert_eq!(run(&tokens(16)).unwrap(), 1);
}

#[test]
fn perplexity_scores_the_second_half_of_chunks() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let text = tokens(40);
    let mut context = context(
        &model,
        ContextOptions {
            n_batch: 10,
            ..precise()
        },
    );
    let mut told = 0;
    let result = perplexity(&mut context, &text, 16, |_| told += 1).unwrap();
    assert_eq!((told, result.chunks.len(), result.tokens), (2, 2, 14));
    let mut sum = 0.0;
    for part in text.chunks_exact(16) {
        let mut part = part.to_vec();
        part[0] = 1;
        let logits = decode(&mut crate::common::context(&model, precise()), &part, 0, 0);
        for at in 8..15 {
            let total: f64 = logits[at].iter().map(|&logit| f64::from(logit).exp()).sum();
            sum -= (f64::from(logits[at][part[at + 1] as usize]).exp() / total).ln();
        }
    }
    let expected = (sum / 14.0).exp();
    assert!(
        (result.value / expected - 1.0).abs() < 1e-4,
        "{} {expected}",
        result.value
    );
    assert!(result.error > 0.0);
    assert!(perplexity(&mut context, &text, 65, |_| ()).is_err());
    assert!(perplexity(&mut context, &text[..9], 16, |_| ()).is_err());
}

/// Returns a real model, if one is available: in `SAMITE_TEST_MODELS`, or in `shared/models` next
/// to the workspace.
fn stories() -> Option<PathBuf> {
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/models");
    let folder =
        std::env::var_os("SAMITE_TEST_MODELS").map_or(PathBuf::from(beside), PathBuf::from);
    Some(folder.join("stories260K.gguf")).filter(|path| path.exists())
}

#[test]
fn a_real_model_generates_the_expected_story() {
    const STORY: &str = ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to play with your ball, but I can'";
    let Some(path) = stories() else {
        samite_testing::skipped("SAMITE_TEST_MODELS does not name a folder with stories260K.gguf");
        return;
    };
    for (devices, rules) in [
        (vec![cpu()], ""),
        (vec![reference("a")], ""),
        (
            vec![reference("a"), reference("b"), cpu()],
            "layers=1-2:b;layers=3:cpu",
        ),
    ] {
        let options = ModelOptions {
            rules: samite_llm::PlacementRule::parse_all(rules).unwrap(),
            ..ModelOptions::new(devices)
        };
        let model = Model::load(&path, &options).unwrap();
        let prompt = model
            .tokenizer()
            .unwrap()
            .tokenize("Once upon a time", true, false)
            .unwrap();
        let context = Context::new(model, ContextOptions::default()).unwrap();
        let mut session = Session::new(context).unwrap();
        let (text, _) = generate(&mut session, &prompt, &some(180));
        let length = text.len().min(STORY.len());
        assert_eq!(length, STORY.len(), "{text}");
        assert_eq!(text[..length], STORY[..length]);
    }
}

/// Resumes the text. Returns the new tokens, and the reason for the end.
fn resume(session: &mut Session, sampler: &mut Sampler, count: usize) -> (Vec<u32>, Finish) {
    let generation = session.resume(sampler, &some(count), |_, _| ControlFlow::Continue(()));
    let generation = generation.unwrap();
    (generation.tokens, generation.finish)
}

#[test]
fn a_stopped_generation_resumes_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session");
    let model = TestModel::tiny("qwen3").load(vec![cpu()], "");
    let lively = SamplerParams {
        temperature: 3.0,
        seed: 5,
        presence_penalty: 1.0,
        min_p: 0.0,
        ..SamplerParams::default()
    };
    for params in [
        lively.clone(),
        SamplerParams {
            mirostat: 2,
            ..lively.clone()
        },
        SamplerParams {
            adaptive_target: 0.02,
            ..lively.clone()
        },
    ] {
        let generate = |count| {
            let mut session = session(&model, 128);
            let mut sampler = Sampler::new(params.clone()).unwrap();
            let generation = session
                .generate(&tokens(9), &mut sampler, &some(count), |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            (session, generation.tokens)
        };
        let (_, whole) = generate(40);
        let (mut first, mut parts) = generate(13);
        // Another seed of the sampler has no effect; nothing is lost if nothing is generated.
        for (count, seed) in [(7, 5), (0, 1), (5, 99), (15, 7)] {
            first.save(&path, "").unwrap();
            first = session(&model, 128);
            first.restore(&path).unwrap();
            let params = SamplerParams {
                seed,
                ..params.clone()
            };
            let mut sampler = Sampler::new(params).unwrap();
            parts.extend(resume(&mut first, &mut sampler, count).0);
        }
        assert_eq!(parts, whole);
        assert_eq!(first.sampler_state().unwrap().seed, 5);
    }
}

#[test]
fn a_resumed_generation_keeps_its_constraint() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let mut session = session(&model, 64);
    let mut sampler = Sampler::new(SamplerParams::default()).unwrap();
    let counting = |end| Box::new(Counting::up_to(end)) as Box<dyn Constraint>;
    sampler.set_constraint(Some(counting(9)));
    let go_on = |_: &str| ControlFlow::Continue(());
    session
        .generate(&tokens(3), &mut sampler, &some(2), go_on)
        .unwrap();
    let before = session.tokens().to_vec();
    let mut again = Sampler::new(SamplerParams::default()).unwrap();
    again.set_constraint(Some(counting(6)));
    let refused = session.resume(&mut again, &some(2), |_, _| ControlFlow::Continue(()));
    assert!(matches!(refused, Err(Error::Sampler(_))), "{refused:?}");
    assert!(session.tokens().starts_with(&before));
    session
        .generate(&tokens(3), &mut sampler, &some(2), go_on)
        .unwrap();
    again.set_constraint(Some(counting(9)));
    let one = resume(&mut session, &mut again, 1);
    assert_eq!(one, (vec![7], Finish::MaxTokens));
    let rest = resume(&mut session, &mut again, 9);
    assert_eq!(rest, (vec![8], Finish::Constraint));
}

#[test]
fn only_an_existing_generation_can_be_resumed() {
    let model = TestModel::tiny("llama").load(vec![cpu()], "");
    let mut session = session(&model, 64);
    let mut sampler = Sampler::new(SamplerParams::greedy()).unwrap();
    let refused = |session: &mut Session, sampler: &mut Sampler| {
        let result = session.resume(sampler, &some(2), |_, _| ControlFlow::Continue(()));
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no generation that could go on"), "{error}");
    };
    refused(&mut session, &mut sampler);
    generate(&mut session, &tokens(3), &some(2));
    session.clear().unwrap();
    refused(&mut session, &mut sampler);
    generate(&mut session, &tokens(3), &some(2));
    session.context_mut().kv_cache_mut().remove(0, 1..).unwrap();
    refused(&mut session, &mut sampler);
    // A text from which tokens were removed cannot be resumed.
    let forgetful = GenerateOptions {
        keep_when_full: Some(2),
        ..some(90)
    };
    generate(&mut session, &tokens(3), &forgetful);
    refused(&mut session, &mut sampler);
    // An end is final, unless it is ignored.
    let params = SamplerParams {
        logit_bias: vec![(2, 1000.0)],
        ..SamplerParams::greedy()
    };
    let mut ending = Sampler::new(params).unwrap();
    let ends = GenerateOptions {
        ignore_end: false,
        ..some(9)
    };
    let go_on = |_: &str| ControlFlow::Continue(());
    session
        .generate(&tokens(3), &mut ending, &ends, go_on)
        .unwrap();
    for _ in 0..2 {
        let resumed = session.resume(&mut sampler, &ends, |_, _| ControlFlow::Continue(()));
        let resumed = resumed.unwrap();
        assert_eq!(resumed.finish, Finish::EndToken(2));
        assert!(resumed.tokens.is_empty());
    }
    assert_eq!(resume(&mut session, &mut sampler, 3).0.len(), 3);
}

/// A prompt that differs from the text before its end, like that of a conversation whose answer is
/// formatted differently. The common prefix is not computed again, for any kind of cache.
#[test]
fn a_common_prefix_is_reused_for_every_cache_kind() {
    for (architecture, has_state) in [
        ("llama", false),
        ("gemma3", false),
        ("deepseek2", false),
        ("lfm2", true),
        ("mamba", true),
        ("mamba2", true),
        ("jamba", true),
        ("granitehybrid", true),
        ("qwen3next", true),
        ("qwen35", true),
    ] {
        let model = TestModel::tiny(architecture).load(vec![cpu()], "");
        let mut talk = session(&model, 256);
        let mut prompt = tokens(60);
        generate(&mut talk, &prompt, &some(9));
        for turn in 0..3 {
            // A state can be restored to its mark, a little before the end of the prompt.
            let marked = prompt.len() - 24;
            let common = 50 + 40 * turn;
            prompt.truncate(common);
            prompt.extend((0..40).map(|i| (i * 7 + 3 + turn as u32) % 100));
            let (text, generation) = generate(&mut talk, &prompt, &some(9));
            let expected = if has_state { marked } else { common };
            assert_eq!(generation.timings.reused_tokens, expected, "{architecture}");
            let (fresh, _) = generate(&mut session(&model, 256), &prompt, &some(9));
            assert_eq!(text, fresh, "{architecture}, turn {turn}");
        }
    }
}

/// Returns a session on a device that is lost at some call and that creates another context then,
/// and the number of times that it did.
fn losing(file: &TestModel, plan: &Arc<FaultPlan>) -> (Session, Arc<AtomicUsize>) {
    let options = |plan: Option<&Arc<FaultPlan>>| ReferenceOptions {
        faults: plan.cloned(),
        ..ReferenceOptions::default()
    };
    let path = file.path.clone();
    let open = move |plan: Option<&Arc<FaultPlan>>| {
        let device = ReferenceDevice::new(options(plan));
        let model = Model::load(&path, &ModelOptions::new(vec![device as _, cpu()]))?;
        let options = ContextOptions {
            n_ctx: Some(64),
            n_batch: 8,
            ..precise()
        };
        Context::new(model, options)
    };
    let mut session = Session::new(open(Some(plan)).unwrap()).unwrap();
    let renewals = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&renewals);
    session.on_loss(move |lost| {
        assert!(lost.is_lost(), "{lost}");
        counter.fetch_add(1, Ordering::SeqCst);
        open(None)
    });
    (session, renewals)
}

#[test]
fn generation_continues_in_another_context_after_a_device_loss() {
    for architecture in ["llama", "lfm2"] {
        let file = TestModel::tiny(architecture);
        let params = SamplerParams {
            temperature: 1.5,
            ..SamplerParams::default()
        };
        let text = |session: &mut Session| {
            let mut sampler = Sampler::new(params.clone()).unwrap();
            let mut text = String::new();
            let generation = session.generate(&tokens(30), &mut sampler, &some(12), |piece| {
                text += piece;
                ControlFlow::Continue(())
            });
            let generation = generation.unwrap();
            let second = generate(session, &tokens(20), &some(3));
            (text, generation.tokens, second.0, second.1.tokens)
        };
        let plan = FaultPlan::new();
        let (mut session, _) = losing(&file, &plan);
        plan.reset();
        let expected = text(&mut session);
        let calls = plan.calls();
        assert!(calls > 30, "{calls}");
        for call in (0..calls).step_by(calls / 29) {
            plan.reset();
            let (mut session, renewals) = losing(&file, &plan);
            plan.reset();
            plan.lose_from(call);
            assert_eq!(text(&mut session), expected, "{architecture}: call {call}");
            assert_eq!(
                renewals.load(Ordering::SeqCst),
                1,
                "{architecture}: call {call}"
            );
        }
    }
}
