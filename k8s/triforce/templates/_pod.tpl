{{/*
The pod template of Ray's head, or of a group of workers. Takes a dict: root; component (head or a group's name); pod (the
options); gpus.
*/}}
{{- define "triforce.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $head := eq .component "head" -}}
{{- $server := $values.settings.server | default dict -}}
{{- $offload := ($values.settings.target | default dict).offload_path -}}
{{- $claim := include "triforce.claim" $root -}}
{{- $hubCache := include "triforce.hubCache" $root -}}
metadata:
  labels:
    {{- include "triforce.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- /* KubeRay does not look at the number of replicas when it decides whether pods must change. */}}
  {{- $replicas := $server.replicas | default dict }}
  {{- $counted := dict "triforce/replicas" (printf "%v-%v" ($replicas.min | default 1) ($replicas.max | default 1)) }}
  {{- with merge (ternary dict $counted $head) .pod.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "triforce.serviceAccount" $root }}
  automountServiceAccountToken: {{ and $head (include "triforce.scales" $root | eq "true") }}
  terminationGracePeriodSeconds: {{ include "triforce.grace" $root }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "runtimeClassName" "priorityClassName" }}
  {{- with get $.pod $field }}
  {{ $field }}: {{- if kindIs "string" . }} {{ . | quote }}{{ else }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  {{- end }}
  initContainers:
    # What clients reach. It ends after the other containers, when their last request has.
    - name: front
      image: {{ include "triforce.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      restartPolicy: Always
      securityContext: {{- include "triforce.restricted" $root | nindent 8 }}
      command: [python, -m, deploy.front]
      args:
        - {{ include "triforce.front" $root | quote }}
        - {{ include "triforce.servePort" $root | quote }}
        - {{ include "triforce.serveGrpcPort" $root | quote }}
      ports:
        - {name: front, containerPort: {{ $server.port | default 8000 | int }}}
        - {name: front-grpc, containerPort: {{ $server.grpc_port | default 9000 | int }}}
      startupProbe:
        tcpSocket: {port: front}
        periodSeconds: 1
        failureThreshold: 60
      resources: {{- toYaml $values.front.resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if $values.tlsSecret }}
        - {name: tls, mountPath: /etc/triforce-tls, readOnly: true}
        {{- end }}
  {{- if and $head $hubCache }}
    # Ray starts on this pod first, so the others find the models. What is there already is not downloaded again.
    - name: download-models
      image: {{ include "triforce.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext: {{- include "triforce.restricted" $root | nindent 8 }}
      command:
        - bash
        - -ec
        - |
          for model in "$@"; do
              hf download "$model" --exclude 'original/*' --exclude 'consolidated*' --include '*.safetensors' \
                  --include '*.json' --include '*.jinja' --include '*.model' --include '*.txt'
          done
        - download
        {{- range include "triforce.hubModels" $root | fromJsonArray }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- include "triforce.variables" (dict "ours" (include "triforce.hubEnv" $root) "given" $values.env) | nindent 8 }}
      resources:
        requests: {cpu: 100m, memory: 1Gi}
        limits: {cpu: "2", memory: 1Gi}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/triforce}
        - {name: models, mountPath: /models}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  {{- end }}
  {{- with $values.initContainers }}
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $head $values.models.claim.size }}
  {{- with ($values.settings.target | default dict).model | default "" }}
  {{- if hasPrefix "/models/" . }}
    # The claim is new: the application would fail until somebody has copied the models into it.
    - name: wait-for-models
      image: {{ include "triforce.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext: {{- include "triforce.restricted" $root | nindent 8 }}
      command: [bash, -c, 'until [ -e "$0" ]; do echo "waiting for $0"; sleep 10; done', {{ . | quote }}]
      resources:
        requests: {cpu: 50m, memory: 64Mi}
        limits: {cpu: 50m, memory: 64Mi}
      volumeMounts:
        - {name: models, mountPath: /models, readOnly: true}
  {{- end }}
  {{- end }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" $head }}
      image: {{ include "triforce.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext: {{- include "triforce.restricted" . | nindent 8 }}
      env:
        {{- include "triforce.variables" (dict "ours" (include "triforce.env" $root) "given" $values.env) | nindent 8 }}
      ports:
        {{- if $head }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: {{ include "triforce.servePort" $root }}}
        - {name: serve-grpc, containerPort: {{ include "triforce.serveGrpcPort" $root }}}
      resources:
        {{- $limits := deepCopy (.pod.resources.limits | default dict) }}
        {{- if .gpus }}{{ $_ := set $limits "nvidia.com/gpu" (.gpus | int) }}{{ end }}
        {{- if and (not $head) $values.workers.cpuLatencyResource }}{{ $_ := set $limits $values.workers.cpuLatencyResource 1 }}{{ end }}
        requests: {{- toYaml .pod.resources.requests | nindent 10 }}
        limits: {{- toYaml $limits | nindent 10 }}
      {{- if not $head }}
      lifecycle:
        preStop:
          exec:
            command: [python, -m, deploy.drain_node, {{ include "triforce.drain" $root | quote }}]
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/triforce}
        {{- if or $claim $values.models.image.reference }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $values.apiKeysSecret }}
        - {name: api-keys, mountPath: /etc/triforce, readOnly: true}
        {{- end }}
        {{- if and $offload (not $head) }}
        - {name: offload, mountPath: {{ $offload | quote }}}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: home, emptyDir: {}}
    {{- if $claim }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $claim | quote }}, readOnly: {{ not (and $head $hubCache) }}}}
    {{- else if $values.models.image.reference }}
    - {name: models, image: {reference: {{ $values.models.image.reference | quote }}, pullPolicy: {{ $values.models.image.pullPolicy }}}}
    {{- end }}
    {{- with $values.apiKeysSecret }}
    - {name: api-keys, secret: {secretName: {{ . }}, items: [{key: api_keys, path: api_keys}], defaultMode: 0440}}
    {{- end }}
    {{- if $values.tlsSecret }}
    - {name: tls, secret: {secretName: {{ $values.tlsSecret | quote }}, defaultMode: 0440}}
    {{- end }}
    {{- if and $offload (not $head) }}
    - {name: offload, emptyDir: {}}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "triforce.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Whether Ray's autoscaler adds and removes pods. */}}
{{- define "triforce.scales" -}}
{{- $replicas := (.Values.settings.server | default dict).replicas | default dict -}}
{{- gt ($replicas.max | default 1 | int) ($replicas.min | default 1 | int) -}}
{{- end -}}

{{/*
What `triforce serve` sets for Ray and Serve before it starts them (but for QUIET, since operators read Ray's reports), and
a HAProxy of Serve's own, behind the front, in place of its proxy, which takes milliseconds for each request: it knows
on which node the gateway is. Its ports are fixed, and it outlives a Ray that is killed, so it suits pods only.
*/}}
{{- define "triforce.env" -}}
{{ .Files.Get "files/environment.yaml" | trim }}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
{{- if .Values.apiKeysSecret }}
- {name: TRIFORCE_API_KEYS, value: /etc/triforce/api_keys}
{{- end }}
# How long a HAProxy that has been replaced may go on with its requests: the grace period of the pods.
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ include "triforce.grace" . | quote }}}
{{- if include "triforce.hubCache" . }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- include "triforce.hubEnv" . }}
{{- end -}}

{{/* Variables of ours, as YAML, and those that are given, which take the place of ours of the same names. */}}
{{- define "triforce.variables" -}}
{{- $given := .given | default list -}}
{{- $names := list -}}
{{- range $given }}{{ $names = append $names .name }}{{ end -}}
{{- $kept := list -}}
{{- range .ours | fromYamlArray }}{{ if not (has .name $names) }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- concat $kept $given | toYaml -}}
{{- end -}}

{{/* What the hub's programs read: where the models are, and the token. */}}
{{- define "triforce.hubEnv" -}}
{{- with include "triforce.hubCache" . }}
- {name: HF_HUB_CACHE, value: {{ . }}}
{{- end }}
{{- with .Values.models.hub.tokenSecret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.models.hub.tokenKey | quote }}}}}
{{- end }}
{{- end -}}
