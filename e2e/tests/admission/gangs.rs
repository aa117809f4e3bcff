//! The policy `kerf-gangs`: what a pod says of its gang can be read, and stays as it is.

use anyhow::ensure;
use kerf_crds::names::{GANG, GANG_SIZE};
use kerf_e2e::kerf::PATIENCE;
use kerf_e2e::{Seen, eventually};
use serde_json::{Map, Value, json};

use super::{has_all, kubectl, refused, test};

/// A pod with these annotations that asks for nothing: what it asks for does not matter here.
fn pod(namespace: &str, annotations: &[(&str, &str)]) -> Value {
    let annotations: Map<String, Value> =
        annotations.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "member", "namespace": namespace, "annotations": annotations },
        "spec": { "containers": [{ "name": "main", "image": "example/any:1" }] },
    })
}

#[test]
fn a_gang_that_cannot_be_read_is_refused_by_the_annotations_name() {
    test(async |kerf| {
        let namespace = kerf.namespace("gangs").await?;
        let dry = ["create", "--dry-run=server"];
        let alone = pod(&namespace, &[(GANG, "train")]);
        eventually(PATIENCE, "the policy in force", || async {
            let answer = refused(kerf, &dry, &alone).await;
            Ok(answer.map_or_else(Seen::not_yet, |said| Seen::when(said, |said| said.contains("kerf-gangs"))))
        })
        .await?;
        let long = "a".repeat(64);
        let name = "metadata.annotations[kerf.dev/gang] is the gang's name: up to 63 lower-case";
        let size = "metadata.annotations[kerf.dev/gang-size] is a whole number from \"1\" to \"1000\"";
        let cases: Vec<(Vec<(&str, &str)>, &str)> = vec![
            (vec![(GANG, "train")], "metadata.annotations[kerf.dev/gang] needs kerf.dev/gang-size beside it"),
            (
                vec![(GANG_SIZE, "2")],
                "metadata.annotations[kerf.dev/gang-size] needs kerf.dev/gang beside it",
            ),
            (vec![(GANG, ""), (GANG_SIZE, "2")], name),
            (vec![(GANG, "Train"), (GANG_SIZE, "2")], name),
            (vec![(GANG, "train.a"), (GANG_SIZE, "2")], name),
            (vec![(GANG, "train-"), (GANG_SIZE, "2")], name),
            (vec![(GANG, &long), (GANG_SIZE, "2")], name),
            (vec![(GANG, "train"), (GANG_SIZE, "0")], size),
            (vec![(GANG, "train"), (GANG_SIZE, "02")], size),
            (vec![(GANG, "train"), (GANG_SIZE, "1001")], size),
            (vec![(GANG, "train"), (GANG_SIZE, "all")], size),
        ];
        for (annotations, part) in cases {
            let pod = pod(&namespace, &annotations);
            let read =
                kerf_crds::gang::read(Some(&serde_json::from_value(pod["metadata"]["annotations"].clone())?));
            ensure!(read.is_err(), "the operator would read {annotations:?} as {read:?}");
            has_all(&refused(kerf, &dry, &pod).await?, &[part], &pod)?;
        }
        for number in ["1", "10", "999", "1000"] {
            kubectl(kerf, &dry, &pod(&namespace, &[(GANG, "train-7b"), (GANG_SIZE, number)])).await?;
        }
        Ok(())
    });
}

#[test]
fn a_pods_gang_stays_as_it_is() {
    test(async |kerf| {
        let namespace = kerf.namespace("gang").await?;
        let both = [(GANG, "train"), (GANG_SIZE, "2")];
        let args = ["apply"];
        eventually(PATIENCE, "the service account of the new namespace", || async {
            let made = kubectl(kerf, &args, &pod(&namespace, &both)).await;
            Ok(made.map_or_else(Seen::not_yet, Seen::Yes))
        })
        .await?;
        let others: [&[(&str, &str)]; 4] = [
            &[(GANG, "train"), (GANG_SIZE, "3")],
            &[(GANG, "other"), (GANG_SIZE, "2")],
            &[(GANG, "train")],
            &[],
        ];
        for other in others {
            let changed = pod(&namespace, other);
            has_all(&refused(kerf, &args, &changed).await?, &["cannot change after its creation"], &changed)?;
        }
        kubectl(kerf, &args, &pod(&namespace, &[both[0], both[1], ("other", "x")])).await?;
        Ok(())
    });
}
