{{/* The workers of one stage, or the spares; {root, name, pipeline, stage: number or "spare", replicas}. */}}
{{- define "shoal.worker" -}}
{{- $worker := .pipeline.worker -}}
{{- $toml := include "shoal.workerToml" (dict "root" .root "pipeline" .pipeline) -}}
{{- $us := dict "root" .root "component" "shard_worker" "pipeline" .name "stage" (toString .stage) "of" $worker "config" (printf "shard_worker-%s.toml" .name) "env" $worker.env "startupSeconds" $worker.startupSeconds "lockMemory" $worker.rdma.resource -}}
{{- $full := printf "%s-worker-%s-%s" (include "shoal.fullname" .root) .name (toString .stage) -}}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $full }}
  labels: {{- include "shoal.labels" $us | nindent 4 }}
spec:
  serviceName: {{ include "shoal.fullname" .root }}-worker
  {{- if or (eq (toString .stage) "spare") (not .pipeline.autoscaling.enabled) }}
  replicas: {{ .replicas }}
  {{- end }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{- include "shoal.selector" $us | nindent 6 }}
  template:
    metadata:
      labels: {{- include "shoal.labels" $us | nindent 8 }}
      annotations:
        shoal/config: {{ $toml | sha256sum }}
        {{- with $worker.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "shoal.pod" $us | nindent 6 }}
      {{- include "shoal.spread" $us | nindent 6 }}
      affinity:
        {{- if $worker.affinity }}
        {{- toYaml $worker.affinity | nindent 8 }}
        {{- else }}
        # stages of one pipeline speak to each other in every step
        podAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 50
              podAffinityTerm:
                topologyKey: {{ .root.Values.topology.zone }}
                labelSelector:
                  matchLabels: {{- include "shoal.selector" (dict "root" .root "component" "shard_worker" "pipeline" .name) | nindent 20 }}
        {{- end }}
      {{- with $worker.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      terminationGracePeriodSeconds: {{ include "shoal.graceSeconds" .root }}
      containers:
        - name: shard-worker
          image: {{ include "shoal.image" (dict "root" .root "name" ($worker.image | default .root.Values.image.shardWorker)) }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: ["--config", "/etc/shoal/shoal.toml"]
          env:
            {{- include "shoal.env" $us | nindent 12 }}
            - name: SHOAL_SHARD_WORKER_LISTEN
              value: tcp://0.0.0.0:7000
            - name: SHOAL_SHARD_WORKER_RPC_LISTEN
              value: 0.0.0.0:7001
            - name: SHOAL_SHARD_WORKER_ADVERTISE_HOST
              value: $(POD_IP)
            {{- if ne (toString .stage) "spare" }}
            - name: SHOAL_SHARD_WORKER_PREFERRED_STAGE
              value: {{ .stage | quote }}
            {{- end }}
            - name: OMP_NUM_THREADS
              value: {{ $worker.threads | quote }}
          ports:
            - {name: ring, containerPort: 7000}
            - {name: rpc, containerPort: 7001}
            - {name: metrics, containerPort: 9464}
          {{- include "shoal.probes" $us | nindent 10 }}
          resources: {{- include "shoal.workerResources" $worker | nindent 12 }}
          {{- include "shoal.containerSecurity" $us | nindent 10 }}
          volumeMounts:
            {{- include "shoal.mounts" $us | nindent 12 }}
            - {name: cache, mountPath: /var/cache/shoal}
            {{- if .pipeline.volume }}
            - {name: models, mountPath: /models, readOnly: true}
            {{- end }}
            {{- if $worker.shm }}
            - {name: shm, mountPath: /dev/shm}
            {{- end }}
      volumes:
        {{- include "shoal.volumes" $us | nindent 8 }}
        - name: cache
          emptyDir: {sizeLimit: 1Gi}
        {{- with .pipeline.volume }}
        - name: models
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- with $worker.shm }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ . }}}
        {{- end }}
{{- end -}}

{{/* Devices are asked for as limits, which are requests too. */}}
{{- define "shoal.workerResources" -}}
{{- $limits := deepCopy (.resources.limits | default dict) -}}
{{- if .gpus }}{{ $_ := set $limits .gpuResource (int .gpus) }}{{ end -}}
{{- if .rdma.resource }}{{ $_ := set $limits .rdma.resource (int .rdma.count) }}{{ end -}}
{{- with .resources.requests }}
requests: {{- toYaml . | nindent 2 }}
{{- end }}
limits: {{- toYaml $limits | nindent 2 }}
{{- end -}}
