// Reads a JSON list of manifests of custom resources; prints a line for each that its own project's schema refuses.
import { readFileSync } from "node:fs";

const packages = {
  "keda.sh": "keda",
  "networking.istio.io": "istio",
  "security.istio.io": "istio",
  "gateway.networking.k8s.io": "gateway-api",
};
for (const manifest of JSON.parse(readFileSync(0))) {
  const { apiVersion, kind } = manifest;
  const name = packages[apiVersion.split("/")[0]];
  try {
    const { [kind]: Model } = await import(`@kubernetes-models/${name}/${apiVersion}/${kind}`);
    new Model(manifest).validate();
  } catch (error) {
    console.log(`${kind} ${manifest.metadata.name}: ${error.message}`);
  }
}
