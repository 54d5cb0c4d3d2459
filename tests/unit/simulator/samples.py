"""Invented measurements of a small machine, in the formats of the public traces."""

from pathlib import Path

from gpuyard.simulator.traces import TraceJob

SINGLES = """\
model,dataset,batchsize,amp,speed,gpu_util,gmem_util,gmem,label
BERT,SQuAD,32,0,84.8,99.0,62.4,20000.0,2
ResNet50,ImageNet,64,0,300.0,95.0,60.0,9000.0,2
NeuMF,MovieLens,128,0,900.0,20.0,10.0,1500.0,0
NeuMF,MovieLens,128,1,950.0,15.0,10.0,1500.0,0
"""
PAIRS = """\
,model1,dataset1,gpu_num1,batchsize1,amp1,speed1,model2,dataset2,gpu_num2,batchsize2,amp2,speed2,gpu_util,gmem
0,BERT,SQuAD,1,32,0,0.62,ResNet50,ImageNet,1,64,0,0.55,99.0,29000
1,BERT,SQuAD,1,32,0,0.97,NeuMF,MovieLens,1,128,0,1.04,99.0,21500
2,ResNet50,ImageNet,1,64,0,0.52,ResNet50,ImageNet,1,64,0,0.52,99.0,18000
"""
CARMA = """\
Model,Max memory.used [MB],Run folder,Execution time(s)
BERT_base_on_wiki,19828.0,2025-09-22_BERT_base_on_wiki.py,894.9
resnet50_imagenet,8800.0,2025-09-22_resnet50_imagenet.py_--batch_size_64_--epochs_1,1200.0
dlrm_criteo,2100.0,2025-09-22_dlrm_criteo.py,300.0
"""
PODS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-0,12000,16384,1,1000,,LS,Running,500,900,600
pod-1,6000,12288,1,460,,BE,Succeeded,700,1500,800
pod-2,6000,12288,0,0,,BE,Succeeded,700,1500,800
pod-3,6000,12288,1,500,,BE,Pending,700,1500,
pod-4,6000,12288,2,1000,,LS,Succeeded,710,1010,710
"""


def write_traces(folder: Path) -> Path:
    (folder / "lucid-single_data.csv").write_text(SINGLES)
    (folder / "lucid-colocate_info.csv").write_text(PAIRS)
    (folder / "carma-summary.csv").write_text(CARMA)
    (folder / "alibaba-openb_pod_list_default.csv").write_text(PODS)
    return folder


def trace_job(at_s: float = 0.0, *, peak_mb: float = 4000.0, duration_s: float = 600.0, **fields: object) -> TraceJob:
    values: dict[str, object] = {"program": "python train.py", "load_percent": 40.0, **fields}
    return TraceJob(at_s=at_s, peak_mb=peak_mb, duration_s=duration_s, **values)  # type: ignore[arg-type]
