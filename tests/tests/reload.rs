//! A model that is unloaded and loaded again speculates as before.

use dflash_bench::engine::{Engine, Job, Prompt, Setup};
use dflash_tests::{assert_no_draft_kv, drafter, golden, target, GreedyFile};

#[tokio::test(flavor = "multi_thread")]
async fn an_unloaded_model_speculates_again_when_it_is_reloaded() {
    let file: GreedyFile = golden("greedy.json");
    let prompt = &file.prompts[2];
    let engine = Engine::load(&Setup::dflash(&target(), &drafter(), Some(8)))
        .await
        .unwrap();
    let job = Job::greedy(Prompt::Tokens(prompt.input_ids.clone()), 48).recorded();
    let reference = &prompt.greedy_ids[..48.min(prompt.greedy_ids.len())];
    let id = engine.host().get_default_model_id().unwrap().unwrap();
    for turn in 0..3 {
        let before = engine.stats();
        let got = engine.generate(&job, |_| ()).await.unwrap();
        assert_eq!(got.tokens, reference, "turn {turn}");
        let stats = engine.stats().since(&before);
        assert!(stats.accepted > 10, "turn {turn}: {stats:?}");
        engine.host().unload_model(&id).unwrap();
        assert_no_draft_kv(&engine).await;
        engine.host().reload_model(&id).await.unwrap();
        // The host forgets which model is the default one when it is unloaded.
        engine.host().set_default_model_id(&id).unwrap();
    }
}
